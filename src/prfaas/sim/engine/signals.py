"""Signals, copies of hot prefixes, and time series, at intervals.

Time series of a run: queues, link, threshold and instances at regular instants.

Looking changes nothing in the run. A long run is looked at less often: once there are too many
samples, every second one is dropped and the interval doubles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prfaas.core.control.replication import CopiedPrompt, Copy, Replication
from prfaas.core.dispatch.links import Link, LinkReport
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.types import Routed
from prfaas.records import Record
from prfaas.sim.engine.dispatch_driver import News
from prfaas.sim.resources.prefill_instance import PrefillInstance
from prfaas.sim.system.clock import Action
from prfaas.sim.system.request import Request
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.sim.engine.request_run import RunParts
    from prfaas.sim.engine.role_changes import RoleChanges

NUM_SAMPLES_MAX = 2_000
"""Even, so that the grid stays regular when every second sample is dropped."""


class SimulatedReplication:
    """Copies prefixes that the PD cluster often misses."""

    def __init__(self, simulation: RunParts) -> None:
        self._sim, setup = simulation, simulation.setup
        assert setup.placement.copies is not None  # noqa: S101 (there is a copier only then)
        self._blocks, self._hot = setup.blocks, Replication[int](setup.placement.copies)

    def routed(self, request: Request, found: Routed, considered: Considered) -> None:
        """A request was routed: count what it computes in the PD cluster and a PrfaaS pool has."""
        for option in considered.missed(found):
            ends = option.pull_link.source, found.destination
            costs = self._sim.transports[ends].costs
            prompt = CopiedPrompt(
                request.block_ids,
                request.num_prompt_tokens,
                self._blocks.tokens,
                self._blocks.checkpoint_blocks > 0,
                costs.shipped_bytes,
            )
            held_tokens, now_ns = option.facts.pullable_tokens, self._sim.clock.now_ns
            self._hot.missed(ends, prompt, found.present_tokens, held_tokens, costs, now_ns)

    def tick(self) -> None:
        """One interval has passed: start what is worth it."""
        now_ns = self._sim.clock.now_ns
        for source, destination in self._hot.links:
            link = self._sim.front.dispatcher.links.between(source, destination)
            state = link.book.latest(now_ns) if link.up else None
            for copy in self._hot.choose((source, destination), state, link.ns_per_byte, now_ns):
                self._start(link, copy)

    def _start(self, link: Link, copy: Copy[int]) -> None:
        pool = self._sim.front.caches.pools[link.destination]

        def ended(landed: bool) -> None:
            link.book.settle(copy.num_bytes)
            # What was there when the copy was chosen may have been evicted meanwhile.
            if landed and pool.num_held(copy.block_ids) >= copy.num_present:
                pool.store(copy.block_ids)

        link.book.promise(copy.num_bytes, self._sim.clock.now_ns)
        ends = link.source, link.destination
        self._sim.transports[ends].copy(copy.num_bytes, ended)


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
        self._observing: Action = self._observe
        self._delivering: Action = self._deliver

    def start(self) -> None:
        """Observe from the start of the run to its end."""
        clock, signals = self._sim.clock, self._sim.setup.signals
        clock.at(0, self._observing)
        clock.after(signals.loop_interval_ns, self._move)

    def _observe(self, _argument: None) -> None:
        sim, signals = self._sim, self._sim.setup.signals
        if not sim.busy:
            return
        clock, now_ns = sim.clock, sim.clock.now_ns
        sim.guards.refresh(now_ns)
        clock.at(now_ns + signals.delay_ns, self._delivering, self._look())
        clock.at(now_ns + signals.interval_ns, self._observing)

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
        for (source, destination), report in seen.links:
            front.dispatcher.links.report(source, destination, report)

    def _move(self, _argument: None) -> None:
        sim, now_ns = self._sim, self._sim.clock.now_ns
        if not sim.busy:
            return
        sim.front.dispatcher.tick(now_ns)
        if self._copier is not None:
            self._copier.tick()
        sim.clock.after(sim.setup.signals.loop_interval_ns, self._move)


class SeriesSample(Record, frozen=True):
    """Sample of one time."""

    at_ns: int
    local_wait_ns: float
    """Work before a PD-P instance, mean over those that are up."""
    remote_wait_ns: float
    """The same of the PrfaaS cluster."""
    link_bits_per_s: float
    link_backlog_bytes: float
    """Bytes that may leave and have not left."""
    num_flows: int
    """Transfers with bytes to send."""
    offload_threshold: int
    num_decode_waiting: int
    """Requests that wait for a slot or for KV blocks."""
    num_decode_running: int
    """Requests in decode batches."""
    num_prefill: int
    """PD instances that prefill and are up."""
    num_decode: int
    """PD instances that decode and are up."""
    num_prfaas: int
    """PrfaaS instances that are up."""


class Series:
    """Samples of a simulation, at most `num_max`, which is even."""

    def __init__(self, simulation: RunParts, roles: RoleChanges, num_max: int) -> None:
        self._num_max = num_max
        self._sim, self._roles = simulation, roles
        self._interval_ns = NS_PER_S
        self.samples: list[SeriesSample] = []

    def start(self) -> None:
        """Look from now to the end of the run."""
        self._sim.clock.after(0, self._look)

    def _look(self, _argument: None) -> None:
        if not self._sim.busy:
            return
        self.samples.append(_sample(self._sim, self._roles))
        if len(self.samples) >= self._num_max:
            del self.samples[1::2]
            self._interval_ns *= 2
        self._sim.clock.at(self.samples[-1].at_ns + self._interval_ns, self._look)


def _sample(sim: RunParts, roles: RoleChanges) -> SeriesSample:
    local = roles.prefilling()
    remote = [instance for instance in sim.remotes.values() if instance.up]
    waiting = running = num_flows = 0
    for decoder in sim.decoders.values():
        waiting += decoder.num_waiting
        running += decoder.num_running
    bits_per_s = 0.0
    backlog = 0.0
    for wan in sim.wans.values():
        bits_per_s += max([transport.link.bits_per_s for transport in wan])
        for transport in wan:
            backlog += transport.link.backlog_bytes()
            num_flows += transport.link.num_active
    return SeriesSample(
        at_ns=sim.clock.now_ns,
        local_wait_ns=_mean_backlog(local),
        remote_wait_ns=_mean_backlog(remote),
        link_bits_per_s=bits_per_s,
        link_backlog_bytes=backlog,
        num_flows=num_flows,
        offload_threshold=sim.front.offload_threshold,
        num_decode_waiting=waiting,
        num_decode_running=running,
        num_prefill=len(local),
        num_decode=len(roles.decoding()),
        num_prfaas=len(remote),
    )


def _mean_backlog(instances: list[PrefillInstance]) -> float:
    total_ns = 0
    for instance in instances:
        total_ns += instance.backlog_ns()
    return total_ns / len(instances) if instances else 0.0
