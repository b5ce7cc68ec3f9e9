"""The timing engine: vLLM's HTTP surface over an engine that computes nothing.

Compute is waiting, as long as a profile says. Everything else is real: the prefix cache, the blocks
that go through the pool node, their bytes, the answers that depend on them.
"""
