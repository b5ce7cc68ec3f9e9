"""Instances: how long prefill and decode take, measured or estimated."""
