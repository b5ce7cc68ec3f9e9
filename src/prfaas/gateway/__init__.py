"""The OpenAI-compatible edge."""
