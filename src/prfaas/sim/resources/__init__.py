"""Instances, links and caches of a run, on the virtual clock."""
