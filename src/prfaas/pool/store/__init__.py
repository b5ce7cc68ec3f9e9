"""Stored blocks: memory, disk, origins, and events about them."""
