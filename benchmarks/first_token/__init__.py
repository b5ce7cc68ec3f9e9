"""The first token from the engine that prefills, over a slow WAN."""
