"""Models: the size of what they leave in the KV cache."""
