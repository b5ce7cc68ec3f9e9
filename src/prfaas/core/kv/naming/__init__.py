"""Names of blocks: the hash chains of the engines."""
