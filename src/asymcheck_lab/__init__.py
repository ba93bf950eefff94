"""Experiments beside the library: real training jobs, comparisons, reports."""
