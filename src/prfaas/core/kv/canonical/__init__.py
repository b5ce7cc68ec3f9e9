"""Canonical blocks: the bytes of a block as the model has them, independent of ranks."""
