"""Purges: their targets and reports, and the intents that survive a crash."""
