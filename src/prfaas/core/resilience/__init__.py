"""Parts that fail or are late: circuit breakers, late routes, budgets, quarantine.

`core.request.watch` detects what is late by the rules here, `core.request.machine` reacts.
"""
