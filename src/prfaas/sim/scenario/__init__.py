"""Scenario files, and runs of them."""
