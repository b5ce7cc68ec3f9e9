"""The simulator's driver of the core's dispatcher: what happens in the run, in the core's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from prfaas.core.admission.fair_share import FairSettings
from prfaas.core.control.split import decode_name
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.link_load import LinkReport
from prfaas.core.dispatch.links import Link
from prfaas.core.dispatch.route_options import Considered
from prfaas.core.dispatch.types import (
    Arrival,
    DispatchSettings,
    HomeCluster,
    Member,
    Refused,
    RemoteCluster,
    Routed,
    ThresholdMoved,
)
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.sim.engine.oracle_check import Heard
from prfaas.sim.engine.pool_caches import Caches, Hit
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import ClusterSetup, Setup


class Front:
    """The gateway of a simulated run. Output lengths do not get past it.

    Args:
        setup: The system.
    """

    def __init__(self, setup: Setup) -> None:
        self._home = setup.name
        self.heard = Heard()
        self._block_tokens = setup.blocks.tokens
        self._asked: dict[int, Request] = {}
        # Instances that may change their role are known under a name in either.
        both = setup.num_prefill + setup.num_decode if setup.roles else 0
        self.prefill_names = tuple(f"p{i:05}" for i in range(both or setup.num_prefill))
        self.prfaas_names = _instance_names(setup.prfaas)
        self.caches = Caches(setup, {setup.name: self.prefill_names, **self.prfaas_names})
        self.decode_names = tuple(f"d{i:05}" for i in range(setup.num_decode))
        if setup.roles is not None:
            self.decode_names = tuple(decode_name(name) for name in self.prefill_names)
        self.settings = _settings(setup)
        self.dispatcher = Dispatcher(
            HomeCluster(
                setup.name,
                tuple(Member(name, setup.name) for name in self.prefill_names),
                tuple(Member(name, setup.name) for name in self.decode_names) or None,
                setup.costs,
            ),
            [
                RemoteCluster(
                    cluster.name,
                    tuple(Member(name, cluster.name) for name in self.prfaas_names[cluster.name]),
                    cluster.costs,
                    cluster.link.price_per_tb,
                    cluster.link.bits_per_s
                    if cluster.link.planned_bits_per_s is None
                    else cluster.link.planned_bits_per_s,
                )
                for cluster in setup.prfaas
            ],
            self.settings,
        )
        for cluster in setup.prfaas:
            self.set_link(cluster.name, up=True)

    def route(
        self, request: Request, hits: Mapping[str, Hit], now_ns: int, *, again: bool
    ) -> tuple[Routed | Refused, Considered]:
        """Decide for a request that arrives, or whose work was lost; also its possible routes."""
        self._asked[request.index] = request
        blocks, prompt = self._block_tokens, request.num_prompt_tokens
        arrival = Arrival(
            request.index,
            prompt,
            num_tokens_to_fit=prompt,
            hits={name: hit[0] for name, hit in hits.items()},
            shippable_tokens=(prompt - 1) // blocks * blocks if request.block_ids else None,
            tenant=request.tenant,
        )
        considered = self.dispatcher.consider(arrival, now_ns)
        return self.dispatcher.decide(arrival, considered, now_ns, again=again), considered

    def _look_up(self, indices: Iterable[int], now_ns: int) -> None:
        """Look up cached prefixes of open requests once more."""
        for index in indices if self.caches.any_room else ():
            hits = self.caches.hits(self._asked[index])
            self.dispatcher.requests.look_up(
                index, {name: hit[0] for name, hit in hits.items()}, now_ns
            )

    def choose_decode(self, request: Request) -> str | None:
        """Name of the instance that decodes a request, chosen when first asked for."""
        return self.dispatcher.requests.choose_decode(request.index)

    def decoder_of(self, request: Request) -> str | None:
        """Name of the instance that was chosen to decode a request."""
        return self.dispatcher.requests.decoder_of(request.index)

    def prefills(self, request: Request) -> str | None:
        """Name of the instance that prefills a request; None once the end was heard of."""
        return self.dispatcher.requests.prefills(request.index)

    def prefilled(self, request: Request, now_ns: int) -> None:
        """The end of a request's prefill was heard of."""
        begun = self.dispatcher.requests.prefilled(request.index, now_ns)
        if begun is not None:
            self._look_up((begun,), now_ns)

    def first_token(self, request: Request, now_ns: int) -> None:
        """A request streams its first token."""
        self.dispatcher.requests.prompt_ready(request.index, request.landed_at_ns)
        self.dispatcher.requests.first_token(request.index, now_ns)

    def landed(self, request: Request, now_ns: int) -> None:
        """All blocks of a request have crossed the link."""
        self.dispatcher.requests.transfer_over(request.index, now_ns)

    def ended(self, request: Request, now_ns: int) -> None:
        """A request is over."""
        del self._asked[request.index]
        self.dispatcher.requests.end(request.index, now_ns)

    def set_link(self, cluster: str, *, up: bool) -> list[int]:
        """A link was found dead or alive; indices of the requests that were on it."""
        self.dispatcher.set_link(self._home, cluster, up=up)
        return self.dispatcher.set_link(cluster, self._home, up=up)

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance failed or recovered."""
        self.dispatcher.set_ready(name, ready=ready, now_ns=now_ns)

    def report_loads(self, observed_at_ns: int, num_waiting: Sequence[tuple[str, int]]) -> None:
        """So many requests were seen to wait at some instances."""
        self.dispatcher.report_loads(observed_at_ns, num_waiting)
        for name, waiting in num_waiting if self.caches.any_room else ():
            if waiting:
                self._look_up(self.dispatcher.requests.due(name, waiting), observed_at_ns)

    def report_link(self, source: str, destination: str, report: LinkReport) -> None:
        """One direction of a link was seen."""
        self.dispatcher.report_link(source, destination, report)

    def link(self, source: str, destination: str) -> Link:
        """What the gateway knows of a link."""
        return self.dispatcher.links.between(source, destination)

    def replan(self, offload_threshold: int) -> None:
        """The long-term loop found a better threshold."""
        self.dispatcher.replan(offload_threshold)

    def tick(self, now_ns: int) -> list[ThresholdMoved]:
        """One interval of the short-term loop."""
        return self.dispatcher.tick(now_ns)

    @property
    def offload_threshold(self) -> int:
        """Current t of the first link, tokens; 0 without one."""
        first = next(iter(self.prfaas_names), None)
        return 0 if first is None else self.link(first, self._home).policy.offload_threshold


def _instance_names(clusters: Sequence[ClusterSetup]) -> dict[str, tuple[str, ...]]:
    """Names of all PrfaaS instances by cluster, counted through."""
    number = count()
    return {
        cluster.name: tuple(f"r{next(number):05}" for _ in range(cluster.num_instances))
        for cluster in clusters
    }


def _settings(setup: Setup) -> DispatchSettings:
    routing, placement = setup.routing, setup.placement
    return DispatchSettings(
        routing.policy,
        routing.offload_threshold,
        routing.bandwidth,
        routing.moving_threshold,
        setup.slo.ttft_ns,
        routing.admission,
        FairSettings(routing.weights),
        setup.signals.stale_after_ns,
        placement.pulls,
        placement.second_price,
        # A run's profiles are exact: its gateway is one that has proven them.
        CalibrationSettings(proven_first=True),
    )
