"""Prefix caches with a limit: what they keep, and who goes first."""
