"""Purges: their targets, and the intents that survive a crash."""
