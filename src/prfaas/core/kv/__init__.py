"""KV blocks: their names, who holds which, and what has to agree before engines can share them."""
