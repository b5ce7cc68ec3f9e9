"""Workloads: synthetic requests, recorded traces, and sessions as a closed loop."""
