"""Recorded workloads: the public formats of traces in, requests and sessions out.

One reader for each format, for the planner, the simulator and `prfaas trace`.
"""
