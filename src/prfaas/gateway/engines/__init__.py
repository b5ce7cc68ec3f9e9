"""Engines: which are ready, how requests are posted to them, and what their KV events say."""
