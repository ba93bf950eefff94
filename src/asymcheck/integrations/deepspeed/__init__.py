"""DeepSpeed's engines as items of a state; DeepSpeed itself is never imported."""
