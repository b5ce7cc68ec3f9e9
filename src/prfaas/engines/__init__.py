"""Inference engines: how vLLM is started and how its KV blocks reach the pool node."""
