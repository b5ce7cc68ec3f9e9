"""KV blocks: what has to agree before engines can share them."""
