"""Fair admission: under overload every tenant gets its share of the work that is admitted.

Admission admits what is predicted to meet the target. Whoever asks most often would then take
every place that falls free. So a tenant that has had more than others, for its weight, has to be
content with a shorter queue: it is admitted only up to a part of the target, and what lies between
that and the whole target is left to those who have had less. The queue stays filled, so nothing is
lost.

The work that a tenant has had is counted in seconds of prefill and fades over a window. The rule
binds only while somebody who has had less was refused within the window: without overload, and
alone, everybody has the whole target.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp

from prfaas.units import NS_PER_S

TENANTS_MAX = 4096
"""Accounts that are kept; the one that was used longest ago goes first."""


@dataclass(frozen=True, slots=True)
class FairSettings:
    """Settings of the sharing of work.

    Attributes:
        weights: Share of a tenant against others, above 0; 1 if absent.
        window_ns: Time in which what a tenant has had fades to 1/e.
        least_ratio: Part of the target that is left to the tenant that has had most.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    window_ns: int = 60 * NS_PER_S
    least_ratio: float = 0.4


@dataclass(slots=True)
class _Account:
    weight: float
    work_ns: float = 0.0
    seen_at_ns: int = 0
    refused_at_ns: int | None = None


class FairShare:
    """Recent use of every tenant.

    Args:
        settings: How work is shared.
    """

    def __init__(self, settings: FairSettings) -> None:
        self._settings = settings
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def limit(self, tenant: str, target: int, now_ns: int) -> int:
        """Part of the target up to which a tenant is admitted.

        Costs one pass over the tenants that were seen within the window.

        Args:
            target: What anybody may have in front of it: a predicted time to first token, places.

        Returns:
            `target`, or the part of it that is left to the tenant.
        """
        mine = self._seen(tenant, now_ns)
        if len(self._accounts) == 1:
            return target
        had = self._had(mine, now_ns)
        others = [a for a in self._recent(now_ns) if a is not mine]
        behind = [a for a in others if self._had(a, now_ns) < had]
        if not any(self._was_refused(a, now_ns) for a in behind):
            return target
        rank = len(behind) / len(others)
        return round(target * (1 - rank * (1 - self._settings.least_ratio)))

    def let_in(self, tenant: str, work_ns: int, now_ns: int) -> None:
        """A request with so much prefill was admitted."""
        self._seen(tenant, now_ns).work_ns += work_ns

    def refused(self, tenant: str, now_ns: int) -> None:
        """A request was refused."""
        self._seen(tenant, now_ns).refused_at_ns = now_ns

    def _seen(self, tenant: str, now_ns: int) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = _Account(self._settings.weights.get(tenant, 1.0), seen_at_ns=now_ns)
            self._accounts[tenant] = account
            if len(self._accounts) > TENANTS_MAX:
                self._accounts.popitem(last=False)
        elif account.seen_at_ns != now_ns:
            account.work_ns *= self._fading(account, now_ns)
            account.seen_at_ns = now_ns
            self._accounts.move_to_end(tenant)
        return account

    def _recent(self, now_ns: int) -> list[_Account]:
        """Accounts of tenants that were seen within the window; the last seen come last."""
        found = []
        for account in reversed(self._accounts.values()):
            if now_ns - account.seen_at_ns > self._settings.window_ns:
                break
            found.append(account)
        return found

    def _had(self, account: _Account, now_ns: int) -> float:
        return account.work_ns * self._fading(account, now_ns) / account.weight

    def _fading(self, account: _Account, now_ns: int) -> float:
        return exp((account.seen_at_ns - now_ns) / self._settings.window_ns)

    def _was_refused(self, account: _Account, now_ns: int) -> bool:
        at_ns = account.refused_at_ns
        return at_ns is not None and now_ns - at_ns <= self._settings.window_ns
