"""The codec room: arrays and compression libraries, no torch, no files."""
