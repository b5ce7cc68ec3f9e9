"""Prefix caches with a limit: contents and eviction."""
