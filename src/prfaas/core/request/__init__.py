"""The life of a request after it was routed: events in, actions out (`states.py` explains it)."""
