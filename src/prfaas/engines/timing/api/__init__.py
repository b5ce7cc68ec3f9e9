"""vLLM's HTTP surface over the timing engine."""
