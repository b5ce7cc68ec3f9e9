"""Watches on a request until its first token: timeouts, a stalled prefill, a route that is late.

A watch says when it has to be looked at, and a look may raise an alarm. It is of a prefill, or of
blocks in transit, and of use as long as these are.
"""

from __future__ import annotations

from enum import StrEnum

from prfaas.core.request.blocks import Movement
from prfaas.core.request.fleet import SharedState
from prfaas.core.request.states import Stage
from prfaas.core.resilience.late_routes import SOONER_RATIO, RemotePath, leaves, patience_ns
from prfaas.units import NS_PER_S

ANSWER_NS = NS_PER_S
"""Time for the answer of a prefill after its last block, which comes over another path."""
LOOK_NS_MIN = NS_PER_S // 10
"""Minimum time between two checks of a route."""

LocalPrefill = tuple[str, int, int]
"""A PD engine that would prefill, "" if it is not chosen yet, and new and cached tokens."""


class WatchAlarm(StrEnum):
    """Reason to abandon a prefill or a pull; labels a metric."""

    TIMEOUT = "timeout"
    """It has taken as long as it may."""
    STALLED = "stalled"
    """A prefill takes many times as long as such prefills do, and a local one is sooner."""
    LATE = "late"
    """A route over a link misses its prediction, and a local one is sooner."""


class PrefillWatch:
    """Watches a prefill leg: its timeout, and whether it has stalled.

    Args:
        fleet: What all requests share.
        local: The prefill in the PD cluster that would replace it.
        now_ns: When the leg starts.
    """

    __slots__ = (
        "_began_at_ns",
        "_ends_at_ns",
        "_fleet",
        "_local",
        "_look_at_ns",
        "_number",
        "wakes_at_ns",
    )
    blocks: Movement | None = None
    stage = Stage.PREFILLING

    def __init__(self, fleet: SharedState, number: int, local: LocalPrefill, now_ns: int) -> None:
        self._fleet, self._number, self._local = fleet, number, local
        self._began_at_ns = now_ns
        self._ends_at_ns = now_ns + fleet.limits.prefill_timeout_ns
        expected_ns = fleet.books.expected_prefill_ns(number)
        self._look_at_ns = None if expected_ns is None else now_ns + patience_ns(expected_ns)
        self.wakes_at_ns = min(self._ends_at_ns, self._look_at_ns or self._ends_at_ns)
        """Time of the next check."""

    def look(self, now_ns: int, *, beside: bool = False) -> WatchAlarm | None:
        """Return the reason to abandon the prefill; None without one."""
        if now_ns >= self._ends_at_ns:
            return self._time_is_over(now_ns)
        if self._look_at_ns is None or now_ns < self._look_at_ns:
            return None
        self._look_at_ns = now_ns + NS_PER_S
        self.wakes_at_ns = min(self._ends_at_ns, self._look_at_ns)
        local_ns = self._local_ns(now_ns, apart=False)
        is_sooner = local_ns is None or local_ns * SOONER_RATIO < now_ns - self._began_at_ns
        if is_sooner and self._fleet.hedges.take(now_ns) is not None:
            return WatchAlarm.STALLED
        return None

    def _local_ns(self, now_ns: int, *, apart: bool) -> int | None:
        """Expected time of a prefill in the PD cluster; None is unknown."""
        name, num_new_tokens, prefix_tokens = self._local
        books = self._fleet.books
        if not name and not apart:
            name = books.choose_decode(self._number) or ""
        return books.expected_local_ns(name, num_new_tokens, prefix_tokens, now_ns, apart=apart)

    def _time_is_over(self, now_ns: int) -> WatchAlarm | None:
        """Leave a prefill that has timed out, unless it is known to be in a queue that moves, and
        nothing else is sooner: then go on waiting.

        Engines that decode are not asked: where queues exceed a timeout they would prefill all the
        time, and those in time would wait for decode.
        """
        left_ns = self._fleet.books.prefill_left_ns(self._number, now_ns)
        if left_ns is None:
            return WatchAlarm.TIMEOUT
        local_ns = self._local_ns(now_ns, apart=True)
        is_sooner = local_ns is not None and local_ns * SOONER_RATIO < left_ns
        if is_sooner and self._fleet.hedges.take(now_ns) is not None:
            return WatchAlarm.LATE
        self._ends_at_ns = self.wakes_at_ns = now_ns + max(left_ns, LOOK_NS_MIN)
        return None


class RouteWatch:
    """Watches a route over a link whose time to first token was predicted.

    Args:
        fleet: What all requests share.
        local: Engine that would prefill instead.
        blocks: They cross the link.
    """

    __slots__ = ("_fleet", "_local", "_number", "_path", "_pause_ns", "blocks", "wakes_at_ns")

    def __init__(
        self, fleet: SharedState, number: int, local: str, blocks: Movement, path: RemotePath
    ) -> None:
        self._fleet, self._number, self._local = fleet, number, local
        self.blocks, self._path = blocks, path
        limits = fleet.limits
        pause_ns = min(round(path.predicted_ns / limits.looks), limits.look_ns_max)
        self._pause_ns = max(pause_ns, LOOK_NS_MIN)
        self.wakes_at_ns = path.started_at_ns + self._pause_ns
        """Time of the next check."""

    def look(self, now_ns: int, *, beside: bool = False) -> WatchAlarm | None:
        """Return the reason to abandon the route; None without one. `beside`: the engine that
        decodes has the request."""
        if now_ns < self.wakes_at_ns:
            return None
        self.wakes_at_ns = now_ns + self._pause_ns
        books, path = self._fleet.books, self._path
        to_come_ns = path.to_come_ns(now_ns, books.link_bits_per_s(*self.blocks.link, now_ns))
        if not path.is_late(now_ns, to_come_ns):
            return None
        local_ns = books.local_path_ns(self._number, self._local, now_ns, beside=beside)
        if local_ns is None or not leaves(path, now_ns, to_come_ns, local_ns):
            return None
        return None if self._fleet.hedges.take(now_ns) is None else WatchAlarm.LATE


class Timeout:
    """An instant after which blocks are not waited for."""

    __slots__ = ("blocks", "wakes_at_ns")

    def __init__(self, blocks: Movement, ends_at_ns: int) -> None:
        self.blocks, self.wakes_at_ns = blocks, ends_at_ns

    def look(self, now_ns: int, *, beside: bool = False) -> WatchAlarm | None:
        """Return the alarm once its time has come."""
        return WatchAlarm.TIMEOUT if now_ns >= self.wakes_at_ns else None


class AnswerWatch:
    """Watches for an answer after all blocks are there: the path to its engine may be gone.

    Args:
        ends_at_ns: When it is waited for no longer.
        stage: Of the request meanwhile.
    """

    __slots__ = ("stage", "wakes_at_ns")
    blocks: Movement | None = None

    def __init__(self, ends_at_ns: int, stage: Stage) -> None:
        self.wakes_at_ns, self.stage = ends_at_ns, stage


Watch = AnswerWatch | PrefillWatch | RouteWatch | Timeout
