"""Models: the size of their KV cache."""
