"""The core's dispatcher in a run, and how late it is told.

A decision uses only reports that a gateway could have received by then: `LeastDelays` records how
late
the dispatcher is informed, and every run is checked. That the dispatcher holds
no reference into the simulation is tested (`tests/sim/test_checks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from prfaas.core.admission.fair_slots import FairSettings
from prfaas.core.control.split import decode_name
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.route_finder import EXPECTED_TOKENS, Considered
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RefusedRequest,
    RemoteCluster,
    Routed,
)
from prfaas.core.kv.blocks import Layout
from prfaas.core.membership.members import LinkEnds, PoolLinks
from prfaas.core.request.driver import DispatcherBooks
from prfaas.core.resilience.quarantine import Target
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.policies import PolicyName
from prfaas.core.routing.predictions import CostModel, ScaledBytes, layout_of
from prfaas.sim.resources.pool_caches import Caches
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import ClusterSetup, Setup


class News(StrEnum):
    """Kinds of reports to a gateway."""

    REPORT = "report of an instance or a link"
    LINK_DEAD = "silence of a link"
    LINK_ALIVE = "recovery of a link"


@dataclass(slots=True)
class LeastDelays:
    """The least time that passed between something and its telling, by kind, ns."""

    least_ns: dict[News, int] = field(default_factory=dict)

    def note(self, news: News, happened_at_ns: int, told_at_ns: int) -> None:
        """Something that happened, or began, at an instant is told at another."""
        late_ns = told_at_ns - happened_at_ns
        known = self.least_ns.get(news)
        if known is None or late_ns < known:
            self.least_ns[news] = late_ns


def too_early(heard: LeastDelays, needed_ns: dict[News, int]) -> list[str]:
    """One line for each kind of news that was told before it could be known.

    Args:
        needed_ns: How long each kind takes, ns.
    """
    return [
        f"the gateway heard of a {news} after {late_ns} ns; that takes {needed_ns[news]} ns"
        for news, late_ns in heard.least_ns.items()
        if late_ns < needed_ns[news]
    ]


class SimulatedDriver(DispatcherBooks):
    """The gateway of a simulated run. Output lengths do not get past it."""

    def __init__(self, setup: Setup) -> None:
        self.heard = LeastDelays()
        self._block_tokens = setup.blocks.tokens
        self._asked: dict[int, Request] = {}
        self._layout: Layout | None = None
        """Counts the bytes between hosts, for a policy that has no plan to count by."""
        if setup.routing.policy is PolicyName.OBSERVED:
            self._layout = layout_of(setup.costs, EXPECTED_TOKENS, has_state=False)
        # Instances that may change their role are known under a name in either.
        both = setup.num_prefill + setup.num_decode if setup.roles else 0
        self.prefill_names = tuple(f"p{i:05}" for i in range(both or setup.num_prefill))
        self.prfaas_names = _instance_names(setup.prfaas)
        self.caches = Caches(setup, {setup.name: self.prefill_names, **self.prfaas_names})
        self.decode_names = tuple(f"d{i:05}" for i in range(setup.num_decode))
        if setup.roles is not None:
            self.decode_names = tuple(decode_name(name) for name in self.prefill_names)
        self.settings = _settings(setup)
        prefill = _members(self.prefill_names, setup.pools)
        # Names of one instance in its two roles are of one host; others follow each other.
        first = 0 if setup.roles else setup.num_prefill
        decode = _members(self.decode_names, setup.pools, first)
        remotes = {
            each.name: _members(self.prfaas_names[each.name], each.pools) for each in setup.prfaas
        }
        self.dispatcher = Dispatcher(
            LocalCluster(
                setup.name,
                prefill,
                decode or None,
                _planned(setup, setup.prfaas[0]) if setup.prfaas else setup.costs,
            ),
            [
                RemoteCluster(
                    cluster.name,
                    remotes[cluster.name],
                    _planned(setup, cluster),
                    cluster.link.price_per_tb,
                    cluster.link.bits_per_s
                    if cluster.link.planned_bits_per_s is None
                    else cluster.link.planned_bits_per_s,
                )
                for cluster in setup.prfaas
            ],
            self.settings,
        )
        clusters = {setup.name: (*prefill, *decode), **remotes}
        members = [(each.name, each.pool, name) for name, its in clusters.items() for each in its]
        self.pool_of = {name: pool for name, pool, _ in members}
        """Pool of each instance."""
        # A cluster without instances has a link as well.
        members += [("", setup.pools_of[name][0], name) for name, its in remotes.items() if not its]
        self.links = PoolLinks(members, (setup.name,)).all()
        """Links to the PD cluster, and between the hosts of a cluster."""
        self._decodes = frozenset(self.decode_names)
        self.has_roles = bool(self._decodes)
        self._down: set[Target] = set()
        """Instances that are not there, or have another role, and links that are dead."""
        self._broken: set[Target] = set()
        """Targets with an open breaker."""
        for ends in self.links:
            self.set_link(ends, up=True)
        for cluster in setup.prfaas:
            if setup.signals.layouts and not _is_right(cluster):
                self.dispatcher.expect_bytes(layout_of(cluster.costs, EXPECTED_TOKENS), now_ns=0)
        self.dispatcher.links.least_threshold = setup.blocks.tokens

    # Requests

    def route(self, request: Request, now_ns: int) -> tuple[Routed | RefusedRequest, Considered]:
        """Decide for a request that arrives; also its possible routes."""
        return self._route(request, self._arrival(request), now_ns)

    def _arrival(self, request: Request, avoid: str = "", *, offloadable: bool = True) -> Arrival:
        blocks, prompt = self._block_tokens, request.num_prompt_tokens
        return Arrival(
            request.index,
            prompt,
            num_tokens_to_fit=prompt,
            hits=self.caches.hits(request),
            shippable_tokens=(prompt - 1) // blocks * blocks if request.block_ids else None,
            tenant=request.tenant,
            offloadable=offloadable,
            avoid=avoid,
            layout=self._layout,
        )

    def as_now(self, number: int, avoid: str, *, offloadable: bool) -> Arrival:
        """An open request as it would arrive now."""
        return self._arrival(self._asked[number], avoid, offloadable=offloadable)

    def hits(self, number: int) -> Mapping[str, int]:
        """Usable cached prefix of an open request by pool and by instance, tokens, as of now."""
        request = self._asked.get(number) if self.caches.any_room else None
        return {} if request is None else self.caches.hits(request)

    def elsewhere(self, number: int, avoid: str, now_ns: int) -> str | None:
        """Route a request again whose decode instance broke; None without another one."""
        name = super().elsewhere(number, avoid, now_ns)
        # Instances that prefill do not decode here, not even where no other one is left.
        return name if name in self._decodes or not self._decodes else None

    # Instances and links

    def set_link(self, ends: LinkEnds, *, up: bool) -> list[int]:
        """A link was found dead or alive; indices of the requests that were on it."""
        (self._down.discard if up else self._down.add)(ends)
        return self._apply_link(*ends)

    def set_ready(self, name: str, *, ready: bool, now_ns: int) -> None:
        """An instance failed or recovered, or got or lost the role of this name."""
        (self._down.discard if ready else self._down.add)(name)
        self._apply(name, now_ns)

    def takes(self, name: str) -> bool:
        """True if an instance gets anything new."""
        return name not in self._down and name not in self._broken

    def _apply(self, name: str, now_ns: int) -> None:
        self.dispatcher.set_ready(name, ready=self.takes(name), now_ns=now_ns)

    def _apply_link(self, source: str, destination: str) -> list[int]:
        ends = source, destination
        up = ends not in self._down and ends not in self._broken
        return self.dispatcher.set_link(*ends, up=up)

    # Reports

    def _look_up(self, numbers: Iterable[int], now_ns: int) -> None:
        """Look up cached prefixes of open requests once more, if there are caches."""
        if self.caches.any_room:
            super()._look_up(numbers, now_ns)

    def report_loads(self, observed_at_ns: int, num_waiting: list[tuple[str, int]]) -> None:
        """Report the requests that wait at some instances."""
        self.dispatcher.report_loads(observed_at_ns, num_waiting)
        if self.caches.any_room:
            for name, waiting in num_waiting:
                if waiting:
                    self._look_up(self.dispatcher.requests.due(name, waiting), observed_at_ns)

    @property
    def offload_threshold(self) -> int:
        """Current t of the first link, tokens; 0 without one."""
        if not self.prfaas_names:
            return 0
        source, destination = self.links[0]
        return self.dispatcher.links.between(source, destination).policy.offload_threshold


def _instance_names(clusters: Sequence[ClusterSetup]) -> dict[str, tuple[str, ...]]:
    """Names of all PrfaaS instances by cluster, counted through."""
    number = count()
    return {
        cluster.name: tuple(f"r{next(number):05}" for _ in range(cluster.num_instances))
        for cluster in clusters
    }


def _members(
    names: Sequence[str], pools: Sequence[str], first: int = 0
) -> tuple[ClusterMember, ...]:
    return tuple(ClusterMember(name, pools[i % len(pools)]) for i, name in enumerate(names, first))


def _planned(setup: Setup, cluster: ClusterSetup) -> CostModel:
    """Costs of a cluster in the gateway's plan, whose bytes and times may be wrong."""
    ratio = cluster.link.planned_bytes_ratio
    costs = cluster.costs if ratio == 1.0 else ScaledBytes(cluster.costs, ratio)
    local, remote = setup.routing.planned_ratios
    return costs if local == remote == 1.0 else _ScaledTimes(costs, local, remote)


class _ScaledTimes(CostModel):
    """Costs of a plan whose times of prefills are multiplied by factors; bytes are the plan's."""

    def __init__(self, costs: CostModel, local: float, remote: float) -> None:
        self._costs, self._local, self._remote = costs, local, remote

    def local_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        return round(self._costs.local_prefill_ns(num_new_tokens, prefix_tokens) * self._local)

    def remote_prefill_ns(self, num_new_tokens: int, prefix_tokens: int = 0) -> int:
        return round(self._costs.remote_prefill_ns(num_new_tokens, prefix_tokens) * self._remote)

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        return self._costs.shipped_bytes(num_prompt_tokens, present_tokens)

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        return self._costs.tail_bytes(num_prompt_tokens, present_tokens)


def _is_right(cluster: ClusterSetup) -> bool:
    return cluster.link.planned_bytes_ratio == 1.0


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
        # Profiles are exact but where a scenario says otherwise: the gateway has proven them.
        CalibrationSettings(
            proven_first=routing.planned_ratios == (1.0, 1.0)
            and all(_is_right(each) for each in setup.prfaas)
        ),
        routing.residency,
        None if setup.market is None else setup.market.make(routing.policy),
    )
