"""Metrics of a pool node."""
