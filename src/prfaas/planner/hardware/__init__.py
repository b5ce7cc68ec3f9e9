"""Instances: prefill and decode times, measured or estimated."""
