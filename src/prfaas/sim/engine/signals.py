"""Signals as the gateway gets them: observed now and then, delivered late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prfaas.core.dispatch.link_load import LinkReport
from prfaas.records import Record
from prfaas.sim.engine.oracle_check import News
from prfaas.sim.resources.shared_link import SharedLink

if TYPE_CHECKING:
    from prfaas.sim.engine.replication import Copier
    from prfaas.sim.engine.request_run import RunParts


class Observation(Record, frozen=True):
    """Observation at one time: waiting requests at every instance, and the link."""

    at_ns: int
    num_waiting: list[tuple[str, int]]
    links: list[tuple[str, str, LinkReport]]
    """Pools at both ends of each direction, and what it was seen to do."""


class _Watch:
    """One direction of a link, as its pool node sees it: it reports while transfers are open."""

    def __init__(self, ends: tuple[str, str], link: SharedLink) -> None:
        self._ends, self._link, self._was_open = ends, link, False

    def look(self, now_ns: int) -> Iterator[tuple[str, str, LinkReport]]:
        """Its counters, with both of its pools."""
        is_open = self._link.num_open > 0
        if is_open or self._was_open:
            yield *self._ends, self._link.report(now_ns)
        self._was_open = is_open


class Telemetry:
    """Observes a simulation, reports to its gateway, and adjusts the threshold."""

    def __init__(self, simulation: RunParts, copier: Copier | None) -> None:
        self._sim, self._copier = simulation, copier
        self._instances = (*simulation.locals.values(), *simulation.remotes.values())
        self._watches = [
            _Watch(ends, transport.link) for ends, transport in simulation.transports.items()
        ]

    def start(self) -> None:
        """Observe from the start of the run to its end."""
        clock, signals = self._sim.clock, self._sim.setup.signals
        clock.at(0, self._observe)
        clock.after(signals.loop_interval_ns, self._move)

    def _observe(self, _argument: None) -> None:
        sim = self._sim
        if not sim.busy:
            return
        sim.guards.refresh(sim.clock.now_ns)
        signals = sim.setup.signals
        sim.clock.after(signals.delay_ns, self._deliver, self._look())
        sim.clock.after(signals.interval_ns, self._observe)

    def _look(self) -> Observation:
        now = self._sim.clock.now_ns
        return Observation(
            now,
            [
                (instance.name, instance.num_waiting)
                for instance in self._instances
                if instance.answers
            ],
            [report for watch in self._watches for report in watch.look(now)],
        )

    def _deliver(self, seen: Observation) -> None:
        front = self._sim.front
        front.heard.note(News.REPORT, seen.at_ns, self._sim.clock.now_ns)
        front.report_loads(seen.at_ns, seen.num_waiting)
        for source, destination, report in seen.links:
            front.dispatcher.report_link(source, destination, report)

    def _move(self, _argument: None) -> None:
        sim, now = self._sim, self._sim.clock.now_ns
        if not sim.busy:
            return
        sim.front.dispatcher.tick(now)
        if self._copier is not None:
            self._copier.tick()
        sim.clock.after(sim.setup.signals.loop_interval_ns, self._move)
