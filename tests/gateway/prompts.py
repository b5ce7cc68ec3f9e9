"""Prompts on both sides of the offload threshold of `conftest.py`, tokens of one byte."""

SHORT = "hi"
LONG = "long prompt " * 30
