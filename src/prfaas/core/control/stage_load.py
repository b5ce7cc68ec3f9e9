"""Load of prefill and decode in the PD cluster, from what its instances report.

Reports are late and may stop: a stage of which one report is too old has no known load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.control.offloaded_work import Spared
from prfaas.core.control.role_loop import StageLoad
from prfaas.units import NS_PER_S

STALE_NS = 10 * NS_PER_S
"""Age beyond which a report counts as unknown."""
_MEAN_WEIGHT = 0.02
"""Weight of the newest request in the mean time of a decode."""


@dataclass(frozen=True, slots=True)
class InstanceQueue:
    """Report of an instance, in whatever role it works.

    Attributes:
        num_running: Requests that run; None if it does not report that.
    """

    observed_at_ns: int
    num_running: int | None
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
