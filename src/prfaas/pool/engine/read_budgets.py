"""Time limits of slow reads, one for each request of an engine, however many loads it has."""

from __future__ import annotations

from collections import OrderedDict

from prfaas.pool.store.tier_ports import ReadBudget

REQUESTS_MAX = 4096
"""Requests whose budget is known; an older one that loads again gets another."""


class ReadBudgets:
    """Budgets by engine and request.

    Args:
        limit_s: Of each, seconds; None is unlimited.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._budgets: OrderedDict[tuple[str, str], ReadBudget] = OrderedDict()

    def of(self, engine: str, request: str) -> ReadBudget:
        """Return the budget of a request; a new one if the engine does not name the request."""
        if not request or self._limit_s is None:
            return ReadBudget(self._limit_s)
        budget = self._budgets.setdefault((engine, request), ReadBudget(self._limit_s))
        if len(self._budgets) > REQUESTS_MAX:
            self._budgets.popitem(last=False)
        return budget
