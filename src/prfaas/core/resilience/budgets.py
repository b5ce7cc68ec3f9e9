"""Budgets on work that is done twice: a share of the requests, and a small floor."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Settings of a budget for repeated work.

    Attributes:
        ratio: What each request adds.
        per_s: What each second adds, requests or not.
        reserve: Most that is saved up: one failure may hit many requests at once.
        wait_max_ns: Longest that somebody waits for his turn once all is spent.
    """

    ratio: float
    per_s: float
    reserve: float
    wait_max_ns: int = 0


RETRIES = BudgetSettings(ratio=0.2, per_s=10.0, reserve=100.0, wait_max_ns=10 * NS_PER_S)
"""Legs that are run again. The numbers are those of Finagle's retry budget."""
HEDGES = BudgetSettings(ratio=0.1, per_s=1.0, reserve=20.0)
"""Remote paths that are left because they are late."""


class Budget:
    """A bucket of tokens, full at first.

    References:
        Finagle's `RetryBudget`; Envoy's `retry_budget`.
    """

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings
        self._balance = settings.reserve
        self._filled_at_ns = 0

    def deposit(self, now_ns: int) -> None:
        """A request came in."""
        settings = self._settings
        if self._balance >= settings.reserve:
            self._filled_at_ns = now_ns
            return
        self._fill(now_ns)
        self._balance = min(self._balance + settings.ratio, settings.reserve)

    def take(self, now_ns: int) -> int | None:
        """Take one.

        Returns:
            How long to wait before it is used, ns, so that a crowd comes spread out; None when all
            is spent, and then nothing was taken.
        """
        self._fill(now_ns)
        left = self._balance - 1
        per_s, wait_ns = self._settings.per_s, 0
        if left < 0:
            wait_ns = round(-left / per_s * NS_PER_S) if per_s else sys.maxsize
        if wait_ns > self._settings.wait_max_ns:
            return None
        self._balance = left
        return wait_ns

    def _fill(self, now_ns: int) -> None:
        gained = (now_ns - self._filled_at_ns) * self._settings.per_s / NS_PER_S
        if gained > 0:
            self._balance = min(self._balance + gained, self._settings.reserve)
            self._filled_at_ns = now_ns
