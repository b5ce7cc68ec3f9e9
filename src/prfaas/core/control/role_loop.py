"""The long-term loop: moves an instance of the PD cluster between prefill and decode.

Prefill produces what decode consumes. Every interval the loop is told how pressed both stages are,
in instances' worth of work, and asks which split would leave the most pressed stage least pressed.

    need of a stage = instances that are busy + work that waits, spread over the horizon
                      + of prefill, offloaded work below the threshold
    pressure of a split = max(prefill need / num_prefill, decode need / num_decode)

A move costs: the instance drains, is converted and starts with nothing. So the loop acts only when
somebody is pressed, when a move of one instance would lower the pressure by more than a margin,
when that has held for a while, and when the last move has been followed by a minimum dwell. Of two
neighbouring splits, each cannot be better than the other by the margin. A backlog may still call
for a move and its undoing: every move back doubles the dwell before the next one back, up to a
maximum, so that such a swing becomes rare. Neither stage is ever left without an instance.

With plans of the splits at hand a move also needs the plan's consent: the split it leads to has to
sustain as much as the present one, of requests as they are lately (`threshold_loop.py`),
or hardly less: a mix is a sample. The threshold is then re-optimised from the plan; so it is when
the plan of the present split has changed for good, because the link carries more or less, or
requests differ.

Load of prefill and decode in the PD cluster, from what its instances report.

Reports are late and may stop: a stage of which one report is too old has no known load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import exp, log
from typing import Protocol

from prfaas.core.control.threshold_loop import Spared
from prfaas.units import NS_PER_S

STALE_NS = 10 * NS_PER_S
"""Age beyond which a report counts as unknown."""
_MEAN_WEIGHT = 0.02
"""Weight of the newest request in the mean time of a decode."""


@dataclass(frozen=True, slots=True)
class InstanceQueue:
    """Report of an instance, in whatever role it works."""

    observed_at_ns: int
    num_running: int | None
    """Requests that run; None if it does not report that."""
    num_waiting: int


class Jobs(Protocol):
    """Prefill work that a gateway has sent to instances."""

    def num_jobs(self, name: str) -> int:
        """Jobs that were sent to an instance and have not ended."""

    def queued_ns(self, name: str) -> int:
        """Work that waits at an instance, ns."""


class StageLoads:
    """Queues of all PD instances, and the mean time of a decode.

    Args:
        decode_slots: Requests that an instance decodes at a time, at least 1.
    """

    def __init__(self, decode_slots: int) -> None:
        self._decode_slots, self._decode_ns = decode_slots, 0.0
        self._queues: dict[str, InstanceQueue] = {}
        self._spared = Spared()

    def report(self, name: str, queue: InstanceQueue) -> None:
        """Take in the report of an instance."""
        self._queues[name] = queue

    def forget(self, name: str) -> None:
        """Forget the reports of an instance."""
        self._queues.pop(name, None)

    def decoded(self, decode_ns: int) -> None:
        """A request has ended, so long after its first token."""
        weight = _MEAN_WEIGHT if self._decode_ns else 1.0
        self._decode_ns += weight * (decode_ns - self._decode_ns)

    def num_reported(self, name: str) -> int:
        """Requests that an instance last reported; 0 without a report."""
        queue = self._queues.get(name)
        return 0 if queue is None else (queue.num_running or 0) + queue.num_waiting

    def prefill(
        self,
        names: Iterable[str],
        jobs_of: Callable[[str], Jobs],
        spared_ns: int,
        now_ns: int,
    ) -> StageLoad | None:
        """Return the load of the instances that prefill; None is unknown.

        Args:
            jobs_of: What was sent to one.
            spared_ns: Prefill that the PD cluster was spared so far, ns of an instance.
        """
        busy, waiting_ns = 0, 0
        for name in names:
            if (queue := self._fresh(name, now_ns)) is None:
                return None
            jobs = jobs_of(name)
            # The report alone where it is complete: adding our jobs would count a request twice.
            is_partial = queue.num_running is None
            busy += bool(jobs.num_jobs(name) if is_partial else self.num_reported(name))
            waiting_ns += jobs.queued_ns(name)
        return StageLoad(busy + self._spared.look(spared_ns, now_ns), waiting_ns)

    def decode(self, names: Iterable[str], now_ns: int) -> StageLoad | None:
        """Return the load of the instances that decode; None is unknown."""
        running, waiting = 0, 0
        for name in names:
            queue = self._fresh(name, now_ns)
            if queue is None or queue.num_running is None:
                return None
            running, waiting = running + queue.num_running, waiting + queue.num_waiting
        slots = self._decode_slots
        return StageLoad(running / slots, round(waiting * self._decode_ns / slots))

    def _fresh(self, name: str, now_ns: int) -> InstanceQueue | None:
        queue = self._queues.get(name)
        return None if queue is None or now_ns - queue.observed_at_ns > STALE_NS else queue


class Role(StrEnum):
    """Role of an instance of the PD cluster."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Limits of the loop, and what a conversion costs."""

    threshold_ratio: float = 0.2
    """A planned threshold that differs less from the present one changes nothing."""
    consent_ratio: float = 0.95
    """Of what the plan says of the present split, the next one has to sustain."""
    pressure_min: float = 0.75
    """Below this pressure nothing is moved, however uneven the stages are."""
    margin_ratio: float = 0.10
    """A move has to lower the pressure by more than this share."""
    patience_ns: int = 120 * NS_PER_S
    """Time that a move has to look worth while before it is made."""
    dwell_ns: int = 300 * NS_PER_S
    """From the end of one conversion to the next move."""
    dwell_max_ns: int = 3600 * NS_PER_S
    """The same at most, after moves to and fro."""
    drain_max_ns: int = 600 * NS_PER_S
    """A drain that takes longer is aborted."""
    horizon_ns: int = 120 * NS_PER_S
    """Waiting work counts as if it had to be done within this time."""
    smoothing_ns: int = 100 * NS_PER_S
    """Time in which what was seen before fades to 1/e in the needs; 0 forgets it."""
    conversion_ns: int = NS_PER_S
    """From the last work of the old role to the first of the new one."""

    def paced(self, dwell_ns: int) -> RoleSettings:
        """The same with another dwell, and all other times but the conversion in proportion."""
        times = {f.name for f in fields(self) if f.name.endswith("_ns")} - {"conversion_ns"}
        return replace(self, **{t: getattr(self, t) * dwell_ns // self.dwell_ns for t in times})


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Observation of a stage."""

    busy_instances: float
    """Running work in instances, offloaded work below the threshold included."""
    waiting_ns: int
    """Work that waits, in time of one instance."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The planner's answer for a split."""

    offload_threshold: int
    rate_per_s: float
    """Arrival rate that it sustains."""


Planned = Callable[[int], SplitPlan | None]
"""The plan of a split by its number of prefill instances, under present conditions."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One instance changes its role, or only the threshold is new."""

    to: Role | None
    """What it does next; None leaves all roles as they are."""
    offload_threshold: int | None = None
    """Threshold of the new split, tokens; None keeps the present one."""


class RoleLoop:
    """Decides when an instance of one PD cluster changes its role.

    Args:
        offload_threshold: The present threshold, tokens.
    """

    def __init__(self, offload_threshold: int, settings: RoleSettings = RoleSettings()) -> None:
        self.settings = settings
        self._needs: tuple[float, float] | None = None
        self._seen_at_ns = 0
        self._wanted: Role | None = None
        self._wanted_since_ns = 0
        self._threshold = max(offload_threshold, 1)
        self._replan_since_ns: int | None = None
        self._changing = False
        self._changed_at_ns: int | None = None
        self._last: Role | None = None
        self._dwell_ns = settings.dwell_ns

    def update(
        self,
        now_ns: int,
        num_prefill: int,
        num_decode: int,
        prefill: StageLoad | None,
        decode: StageLoad | None,
        planned: Planned | None = None,
    ) -> RoleChange | None:
        """One interval has passed.

        Args:
            prefill: What was seen of them; None is unknown or too old.
            planned: Plans of splits; None without profiles.

        Returns:
            The change to start. When a role changes, the loop rests until `changed` says that it
            is over.
        """
        if prefill is None or decode is None:
            self._wanted = None
            return None
        self._see(now_ns, prefill, decode)
        wanted = self._better(num_prefill, num_decode, planned)
        if wanted is not self._wanted:
            self._wanted, self._wanted_since_ns = wanted, now_ns
        rests = self._changing or not self._is_rested(now_ns, wanted)
        waits = now_ns - self._wanted_since_ns < self.settings.patience_ns
        if wanted is None or rests or waits:
            return None if self._changing else self._replan(now_ns, num_prefill, planned)
        self._turn(now_ns, wanted)
        self._changing, self._wanted = True, None
        return RoleChange(wanted, self._take_plan(num_prefill + _step(wanted), planned))

    def changed(self, now_ns: int) -> None:
        """The change is over, or was aborted: the dwell begins."""
        self._changing = False
        self._changed_at_ns = now_ns

    def _is_rested(self, now_ns: int, wanted: Role | None) -> bool:
        """Return True if the dwell is over; on the way back it may be longer."""
        if self._changed_at_ns is None:
            return True
        dwell_ns = self._dwell_ns if wanted is not self._last else self.settings.dwell_ns
        return now_ns - self._changed_at_ns >= dwell_ns

    def _turn(self, now_ns: int, wanted: Role) -> None:
        """A move back makes the next one back rarer; a long rest makes it as easy as the first."""
        settings = self.settings
        rested_ns = now_ns - (self._changed_at_ns or 0)
        if self._last not in (None, wanted):
            doubled = min(2 * self._dwell_ns, settings.dwell_max_ns)
            self._dwell_ns = settings.dwell_ns if rested_ns > settings.dwell_max_ns else doubled
        self._last = wanted

    def _replan(self, now_ns: int, num_prefill: int, planned: Planned | None) -> RoleChange | None:
        """A new threshold for the present split, when its plan has changed for good."""
        plan = planned(num_prefill) if planned else None
        if plan is None or plan.offload_threshold < 1:
            return None
        far = abs(log(plan.offload_threshold / self._threshold)) > self.settings.threshold_ratio
        if not far:
            self._replan_since_ns = None
            return None
        if self._replan_since_ns is None:
            self._replan_since_ns = now_ns
        if now_ns - self._replan_since_ns < self.settings.patience_ns:
            return None
        return RoleChange(None, self._take_plan(num_prefill, planned))

    def _take_plan(self, num_prefill: int, planned: Planned | None) -> int | None:
        plan = planned(num_prefill) if planned else None
        self._replan_since_ns = None
        if plan is None or plan.offload_threshold < 1:
            return None
        self._threshold = plan.offload_threshold
        return self._threshold

    def _see(self, now_ns: int, prefill: StageLoad, decode: StageLoad) -> None:
        horizon, smoothing = self.settings.horizon_ns, self.settings.smoothing_ns
        newest = [s.busy_instances + s.waiting_ns / horizon for s in (prefill, decode)]
        before, elapsed_ns = self._needs or (newest[0], newest[1]), now_ns - self._seen_at_ns
        weight = 1 - exp(-elapsed_ns / smoothing) if smoothing else 1.0
        self._seen_at_ns = now_ns
        self._needs = (
            before[0] + weight * (newest[0] - before[0]),
            before[1] + weight * (newest[1] - before[1]),
        )

    def _better(self, num_prefill: int, num_decode: int, planned: Planned | None) -> Role | None:
        """The role that one instance should change to; None when the split is good as it is."""
        present = self._pressure(num_prefill, num_decode)
        if present < self.settings.pressure_min:
            return None
        best, best_pressure = None, present * (1 - self.settings.margin_ratio)
        for role in Role:
            step = _step(role)
            if min(num_prefill + step, num_decode - step) < 1:
                continue
            found = self._pressure(num_prefill + step, num_decode - step)
            if found < best_pressure and self._agrees(planned, num_prefill, step):
                best, best_pressure = role, found
        return best

    def _agrees(self, planned: Planned | None, num_prefill: int, step: int) -> bool:
        """Return True if the plan does not mind a move."""
        present, found = (planned(num_prefill + n) if planned else None for n in (0, step))
        if present is None or found is None:
            return True
        return found.rate_per_s >= self.settings.consent_ratio * present.rate_per_s

    def _pressure(self, num_prefill: int, num_decode: int) -> float:
        assert self._needs is not None  # noqa: S101 (seen before it is asked)
        return max(self._needs[0] / num_prefill, self._needs[1] / num_decode)


def _step(role: Role) -> int:
    """Change of the number of prefill instances when one takes a role."""
    return 1 if role is Role.PREFILL else -1
