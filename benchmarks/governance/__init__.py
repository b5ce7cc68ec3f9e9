"""Costs of governance: each protection on and off, in turn, over a whole deployment."""
