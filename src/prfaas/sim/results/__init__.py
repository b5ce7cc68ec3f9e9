"""Figures of a run, and what has to hold after it."""
