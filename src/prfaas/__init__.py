"""Prefill-as-a-Service for LLM serving."""

__version__ = "0.1.0"
