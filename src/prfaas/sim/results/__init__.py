"""Figures of a run, and its invariants."""
