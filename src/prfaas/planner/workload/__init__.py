"""Workloads: prompt lengths, from distributions and traces."""
