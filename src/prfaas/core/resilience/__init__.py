"""Parts that fail or are late: circuit breakers, late routes, budgets, quarantine."""
