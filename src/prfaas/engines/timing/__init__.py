"""The timing engine: vLLM's HTTP surface over an engine that computes nothing.

It waits for the times of a profile in place of computing. Everything else is real: the prefix
cache, the blocks that go through the pool node, their bytes, the answers that depend on them.
"""
