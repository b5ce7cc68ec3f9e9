"""Residency as a whole: policies, topologies and requests drawn at random."""
