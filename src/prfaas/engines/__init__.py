"""Inference engines: how vLLM is started and how its KV blocks reach the pool node.

The secondary tier runs in vLLM's scheduler and sends requests to the pool node over a unix socket;
bytes stay in shared memory. Every private name of vLLM is in `vllm_compat`.
"""
