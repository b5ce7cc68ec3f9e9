"""Tenants: API keys, cache salts, what each may use."""
