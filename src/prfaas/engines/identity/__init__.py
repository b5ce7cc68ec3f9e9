"""Identity of an engine's KV blocks: the bytes of its model, and its effective configuration."""
