"""Admission by predicted time to first token: an early refusal instead of a queue that is late.

Predictions of queues have errors, and a queue that is filled up to the target misses it with half
of what it serves. So the target is approached only up to a margin, which follows the errors.

Order of admission between classes of service.

While requests of a class are refused, those of lower classes are admitted only up to a part of
their target: the queue becomes shorter, until the higher class is in time again.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.admission.fair_slots import FairSettings, FairShare
from prfaas.core.market.classes import ServiceClass
from prfaas.core.routing.decision import Decision, Path
from prfaas.units import NS_PER_S

WINDOW_NS = 60 * NS_PER_S
"""Time for which a refusal shortens the queue of lower classes."""
LEAST_RATIO = 0.4
"""Part of the target that is left to them."""


class Priorities:
    """The last refusal of each priority."""

    def __init__(self) -> None:
        self._refused_at_ns: dict[int, int] = {}

    def limit(self, priority: int, target_ns: int, now_ns: int) -> int:
        """Part of the target up to which a request is admitted, ns.

        Args:
            target_ns: Predicted time to first token that is the limit without higher classes.
        """
        for other, at_ns in self._refused_at_ns.items():
            if other > priority and now_ns - at_ns <= WINDOW_NS:
                return round(target_ns * LEAST_RATIO)
        return target_ns

    def refused(self, priority: int, now_ns: int) -> None:
        """A request of this priority was refused."""
        self._refused_at_ns[priority] = now_ns


RETRY_AFTER_S_MAX = 60
_QUANTILE = 0.9
_STEP = 0.01
_MARGIN_RATIO_MAX = 0.3


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer at the door."""

    admitted: bool
    """True if admitted."""
    retry_after_s: int = 0
    """For the 429's `Retry-After`, whole seconds, at least 1; 0 if admitted."""


_ADMITTED = Admission(admitted=True)


def admit(predicted_ttft_ns: int | None, ttft_max_ns: int | None) -> Admission:
    """Admit requests that are predicted to meet the target, or without prediction or target.

    Args:
        predicted_ttft_ns: Predicted time to first token on the chosen path.
    """
    if predicted_ttft_ns is None or ttft_max_ns is None or predicted_ttft_ns <= ttft_max_ns:
        return _ADMITTED
    over_s = -(-(predicted_ttft_ns - ttft_max_ns) // NS_PER_S)
    return Admission(admitted=False, retry_after_s=min(over_s, RETRY_AFTER_S_MAX))


class Margin:
    """Lateness against predictions: a high quantile of recent requests, found step by step.

    Each request that comes later than predicted by more than the margin raises it by 0.9 of a step,
    every other one lowers it by 0.1 of a step. A step is 1 % of the target.

    Args:
        target_ns: Target of the time to first token.
    """

    def __init__(self, target_ns: int) -> None:
        self._step_ns, self._most_ns = target_ns * _STEP, target_ns * _MARGIN_RATIO_MAX
        self._margin_ns = 0.0

    @property
    def margin_ns(self) -> int:
        """Time to stay below the target, at most 30 % of it; 0 while requests come as predicted."""
        return round(self._margin_ns)

    def seen(self, late_ns: int) -> None:
        """Record by how much a request came later than predicted; below 0 earlier."""
        rise = _QUANTILE if late_ns > self._margin_ns else _QUANTILE - 1
        self._margin_ns = min(max(self._margin_ns + rise * self._step_ns, 0.0), self._most_ns)


class AdmissionControl:
    """Admits requests that are predicted to be in time, each tenant up to its fair share.

    Args:
        target_ns: Target of the time to first token; None admits every request whose class has
            none either.
        fairness: How tenants share what is admitted under overload.
    """

    def __init__(self, target_ns: int | None, fairness: FairSettings) -> None:
        self._target_ns, self._fair = target_ns, FairShare(fairness)
        self._margins = {path: Margin(target_ns or 0) for path in Path}
        self._class_margins: dict[tuple[Path, int], Margin] = {}
        self._priorities: Priorities | None = None
        """Made when the first request with a class comes."""

    def decide(
        self,
        tenant: str,
        path: Path,
        predicted_ns: int | None,
        work_ns: int,
        now_ns: int,
        service: ServiceClass | None = None,
    ) -> Admission:
        """Admit or refuse a request.

        Args:
            tenant: Whose it is; one that has had much is admitted only up to a shorter wait.
            predicted_ns: Predicted time to first token; None is unknown or unproven, and admitted.
            work_ns: Its prefill as a local instance takes it, ns; counted for the tenant.
            service: Its class of service; None is that of the deployment.
        """
        target_ns, margin = self._target_ns, self._margins[path]
        if service is not None:
            self._priorities = self._priorities or Priorities()
            if service.ttft_max_ns is not None:
                target_ns = service.ttft_max_ns
                margin = self._class_margins.setdefault((path, target_ns), Margin(target_ns))
        if target_ns is None:
            return _ADMITTED
        within_ns = self._fair.limit(tenant, target_ns - margin.margin_ns, now_ns)
        if self._priorities is not None:
            priority = 0 if service is None else service.priority
            within_ns = self._priorities.limit(priority, within_ns, now_ns)
        found = admit(predicted_ns, within_ns)
        if found.admitted:
            self._fair.let_in(tenant, work_ns, now_ns)
        else:
            self._fair.refused(tenant, now_ns)
            if self._priorities is not None:
                self._priorities.refused(0 if service is None else service.priority, now_ns)
        return found

    def seen(self, decision: Decision, ttft_ns: int) -> None:
        """Record when the first token of an admitted request came."""
        predicted_ns = decision.predicted_ns
        if predicted_ns is not None:
            self._margins[decision.path].seen(ttft_ns - predicted_ns)
            if self._class_margins:
                for (path, _), margin in self._class_margins.items():
                    if path is decision.path:
                        margin.seen(ttft_ns - predicted_ns)
