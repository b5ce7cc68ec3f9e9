"""The state machine of a routed request: events in, actions out (`states.py` explains it)."""
