"""Stored blocks: memory, disk, origins, and events about them.

One name space over all tiers. Memory is an arena with a hard limit; blocks that it would evict next
are written below in advance, so eviction never waits. Every block has the origin that purges use.
"""
