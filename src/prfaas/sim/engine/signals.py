"""Signals as the gateway gets them: observed now and then, delivered late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.core.dispatch.links import LinkReport
from prfaas.records import Record
from prfaas.sim.engine.oracle_check import News

if TYPE_CHECKING:
    from prfaas.sim.engine.replication import SimulatedReplication
    from prfaas.sim.engine.request_run import RunParts


class Observation(Record, frozen=True):
    """Observation at one time: waiting requests at every instance, and the links in use."""

    at_ns: int
    num_waiting: list[tuple[str, int]]
    links: list[tuple[tuple[str, str], LinkReport]]
    """Pools at both ends of each direction, and what it was seen to do."""


class Telemetry:
    """Observes a simulation, reports to its gateway, and adjusts the threshold."""

    def __init__(self, simulation: RunParts, copier: SimulatedReplication | None) -> None:
        self._sim, self._copier = simulation, copier
        self._instances = (*simulation.locals.values(), *simulation.remotes.values())
        self._open: set[tuple[str, str]] = set()
        """Links with open transfers at the last observation."""

    def start(self) -> None:
        """Observe from the start of the run to its end."""
        clock, signals = self._sim.clock, self._sim.setup.signals
        clock.at(0, self._observe)
        clock.after(signals.loop_interval_ns, self._move)

    def _observe(self, _argument: None) -> None:
        sim, signals = self._sim, self._sim.setup.signals
        if not sim.busy:
            return
        sim.guards.refresh(sim.clock.now_ns)
        sim.clock.after(signals.delay_ns, self._deliver, self._look())
        sim.clock.after(signals.interval_ns, self._observe)

    def _look(self) -> Observation:
        now_ns, were_open, reports = self._sim.clock.now_ns, self._open, []
        num_waiting = [(each.name, len(each.queue)) for each in self._instances if each.answers]
        for ends, transport in self._sim.transports.items():
            link = transport.link
            # A pool node reports while transfers are open, and once more after them.
            if link.num_open:
                were_open.add(ends)
                reports.append((ends, link.report(now_ns)))
            elif ends in were_open:
                were_open.remove(ends)
                reports.append((ends, link.report(now_ns)))
        return Observation(now_ns, num_waiting, reports)

    def _deliver(self, seen: Observation) -> None:
        front = self._sim.front
        front.heard.note(News.REPORT, seen.at_ns, self._sim.clock.now_ns)
        front.report_loads(seen.at_ns, seen.num_waiting)
        for ends, report in seen.links:
            front.dispatcher.report_link(*ends, report)

    def _move(self, _argument: None) -> None:
        sim, now_ns = self._sim, self._sim.clock.now_ns
        if not sim.busy:
            return
        sim.front.dispatcher.tick(now_ns)
        if self._copier is not None:
            self._copier.tick()
        sim.clock.after(sim.setup.signals.loop_interval_ns, self._move)
