"""Time series of a run: queues, link, threshold and instances at regular instants.

Looking changes nothing in the run. A long run is looked at less often: once there are too many
samples, every second one is dropped and the interval doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from prfaas.sim.resources.prefill_instance import PrefillInstance
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from prfaas.sim.engine.request_run import RunParts
    from prfaas.sim.engine.role_changes import RoleChanges

NUM_SAMPLES_MAX = 2_000
"""Even, so that the grid stays regular when every second sample is dropped."""


class SeriesSample(NamedTuple):
    """Sample of one time.

    Attributes:
        local_wait_ns: Work before a PD-P instance, mean over those that are up.
        remote_wait_ns: The same of the PrfaaS cluster.
        link_backlog_bytes: Bytes that may leave and have not left.
        num_flows: Transfers with bytes to send.
        num_decode_waiting: Requests that wait for a slot or for KV blocks.
        num_decode_running: Requests in decode batches.
        num_prefill: PD instances that prefill and are up.
        num_decode: PD instances that decode and are up.
        num_prfaas: PrfaaS instances that are up.
    """

    at_ns: int
    local_wait_ns: float
    remote_wait_ns: float
    link_bits_per_s: float
    link_backlog_bytes: float
    num_flows: int
    offload_threshold: int
    num_decode_waiting: int
    num_decode_running: int
    num_prefill: int
    num_decode: int
    num_prfaas: int


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
    bits_per_s: float = 0
    backlog: float = 0
    for wan in sim.wans.values():
        bits_per_s += max(transport.link.bits_per_s for transport in wan)
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


def _mean_backlog(instances: Sequence[PrefillInstance]) -> float:
    total_ns = 0
    for instance in instances:
        total_ns += instance.backlog_ns()
    return total_ns / len(instances) if instances else 0.0
