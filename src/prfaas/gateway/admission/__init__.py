"""Limits, queues and quarantine that a request passes before it gets an engine."""
