"""Tenants: API keys, cache salts, limits."""
