"""Basic types of a run: clock, requests, setup."""
