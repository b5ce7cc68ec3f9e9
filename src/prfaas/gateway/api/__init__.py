"""The HTTP endpoints, who may use them, and how many requests are let in."""
