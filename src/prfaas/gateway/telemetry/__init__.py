"""Metrics, traces and records of requests."""
