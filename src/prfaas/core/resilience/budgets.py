"""Budgets on work that is done twice: a share of the requests, and a small floor.

Time that instances which decode have for prefills: a bounded share of all time.

While such an instance prefills, its decode steps take many times as long. Fallbacks are few, unless
something is wrong: a link with a hundred prompts in transit is cut, or a queue exceeds a timeout.
Then decode engines that take them all serve nobody. So each has an account that fills with a share
of the time, up to a reserve, and prefills that are left to it are charged to it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from prfaas.core.invariants import hold
from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Settings of a budget for repeated work."""

    ratio: float
    """Increase by each request."""
    per_s: float
    """Increase by each second, requests or not."""
    reserve: float
    """Most that is saved up: one failure may hit many requests at once."""
    wait_max_ns: int = 0
    """Longest that somebody waits for his turn once all is spent."""


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

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        hold(no_more_is_saved_than_the_reserve=self._balance <= self._settings.reserve)

    def _fill(self, now_ns: int) -> None:
        gained = (now_ns - self._filled_at_ns) * self._settings.per_s / NS_PER_S
        if gained > 0:
            self._balance = min(self._balance + gained, self._settings.reserve)
            self._filled_at_ns = now_ns


SHARE = 0.1
"""Share of the time of an instance that decodes in which it may prefill."""
RESERVE_NS = NS_PER_S
"""Most that is saved up."""


class SpareTime:
    """Accounts of instances.

    Args:
        names: Instances that only decode; all others have as much time as is asked for.
    """

    def __init__(self, names: list[str]) -> None:
        self._balance_ns = dict.fromkeys(names, float(RESERVE_NS))
        self._filled_at_ns = dict.fromkeys(names, 0)

    def add(self, name: str) -> None:
        """Open the account of a new instance."""
        self._balance_ns[name], self._filled_at_ns[name] = float(RESERVE_NS), 0

    def remove(self, name: str) -> None:
        """Close an account."""
        del self._balance_ns[name], self._filled_at_ns[name]

    def has(self, name: str, now_ns: int) -> bool:
        """Return True if an instance may prefill: its account is not overdrawn."""
        return name not in self._balance_ns or self._filled(name, now_ns) > 0

    def take(self, name: str, work_ns: int, now_ns: int) -> None:
        """Charge a prefill to an instance, which may overdraw its account."""
        if name in self._balance_ns:
            self._balance_ns[name] = self._filled(name, now_ns) - work_ns

    def _filled(self, name: str, now_ns: int) -> float:
        gained = SHARE * max(0, now_ns - self._filled_at_ns[name])
        self._filled_at_ns[name] = max(now_ns, self._filled_at_ns[name])
        self._balance_ns[name] = min(self._balance_ns[name] + gained, RESERVE_NS)
        return self._balance_ns[name]
