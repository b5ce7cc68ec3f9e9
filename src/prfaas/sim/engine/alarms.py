"""Alarms of the machines of requests in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.sim.system.clock import Clock

if TYPE_CHECKING:
    from prfaas.sim.engine.request_run import SimulatedRequestRun

_SPAN_BITS = 31
"""A span is 2.1 s."""


class Alarms:
    """Wakes requests. Few wait for that to the end: so one event serves all alarms of a span of
    time, and only those that are of use still when it begins enter the clock's heap."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: dict[int, list[tuple[int, SimulatedRequestRun]]] = {}

    def set(self, at_ns: int, run: SimulatedRequestRun) -> None:
        """Wake a request at an instant."""
        span = at_ns >> _SPAN_BITS
        if span == self._clock.now_ns >> _SPAN_BITS:
            self._clock.at(at_ns, run.wake, at_ns)
        elif (waiting := self._spans.get(span)) is not None:
            waiting.append((at_ns, run))
        else:
            self._spans[span] = [(at_ns, run)]
            self._clock.at(span << _SPAN_BITS, self._begin, span)

    def _begin(self, span: int) -> None:
        for at_ns, run in self._spans.pop(span):
            if run.waits_for(at_ns):
                self._clock.at(at_ns, run.wake, at_ns)
