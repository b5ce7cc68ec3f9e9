"""Counts of what was done about failures and delays in a run."""

from __future__ import annotations

from collections import Counter

from prfaas.core.request.actions import FellBack
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import Target, label_of


class Reactions:
    """Counts of the actions of the machine and the breakers, as in the gateway's metrics."""

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()
        """Routes that were left or did not pay off, by "stage/reason"."""
        self.retries: Counter[str] = Counter()
        """Decode legs that ran again ("made"), or might not ("over_budget")."""
        self.opened: Counter[str] = Counter()
        """Number of openings of a target's breaker."""
        self.touched: set[int] = set()
        """Requests that fell back in any way."""
        self.num_recomputed = 0
        """Prompts that an instance that decodes computed, in whole or in part."""

    def fell_back(self, index: int, action: FellBack) -> None:
        """A request left its route."""
        self.touched.add(index)
        self.fallbacks[f"{action.stage}/{action.reason}"] += 1

    def retried(self, *, is_allowed: bool) -> None:
        """A decode leg was to run again."""
        self.retries["made" if is_allowed else "over_budget"] += 1

    def changed(self, target: Target, _before: BreakerState, after: BreakerState) -> None:
        """A breaker changed."""
        if after is BreakerState.OPEN:
            self.opened[label_of(target)] += 1
