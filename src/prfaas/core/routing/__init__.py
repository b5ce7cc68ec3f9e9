"""Routing policies and their predictions."""
