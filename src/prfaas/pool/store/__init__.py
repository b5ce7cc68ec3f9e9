"""Blocks at rest: memory, disk, where they came from, and events about them."""
