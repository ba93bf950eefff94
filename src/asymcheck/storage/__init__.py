"""Bytes at rest: the format, the stores, and the repository of committed checkpoints."""
