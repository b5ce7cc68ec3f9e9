"""Engines: readiness, HTTP requests to them, and their KV events."""
