"""The gateway's driver of the core's dispatcher: converts reports of engines and pools to its
events.

No sockets and no clock: time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from prfaas.config.clusters import ClusterRole, EngineRole
from prfaas.config.deployment import Deployment
from prfaas.core.control.role_loop import InstanceQueue, Role
from prfaas.core.control.split import decode_name, instance_of
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.scoring import UNREACHABLE
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    RefusalReason,
    RefusedRequest,
    Routed,
)
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.kv.shipping import CheckpointRule
from prfaas.core.kv.source_sets import Hits
from prfaas.core.membership.members import PoolLinks
from prfaas.core.request.driver import DispatcherBooks
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.decision import Reason
from prfaas.gateway.routing.dispatcher_setup import Profiles, make_dispatcher, make_split
from prfaas.gateway.routing.part_states import EngineStates, LinkName, PoolView
from prfaas.wire.messages.gateway import LinkTelemetry

NAMED_MAX = 4
"""Parts that the explanation of an obstacle names."""


class Driver(DispatcherBooks):
    """Keeps the dispatcher's view of the deployment up to date, and asks it.

    Args:
        calibration: Limits of the corrections of predictions; None takes the usual ones.
    """

    def __init__(
        self,
        deployment: Deployment,
        profiles: Profiles,
        index: PrefixIndex,
        calibration: CalibrationSettings | None = None,
    ) -> None:
        self.index = index
        local = deployment.clusters_of(ClusterRole.PD)
        engines = [
            (name, engine.pool, cluster)
            for cluster, table in deployment.clusters.items()
            for name, engine in table.engines.items()
        ]
        self._pool_of = {name: pool for name, pool, _ in engines}
        self.states = EngineStates({name: cluster for name, _, cluster in engines})
        self.num_late = 0
        """Requests that admission refused."""
        self._lengths: dict[str, int] = {}
        self._asked: dict[int, Arrival] = {}
        self._broken = self.states.broken
        self._views: dict[str, PoolView] = {}
        self._local_names = frozenset(local)
        self._pool_links = PoolLinks(engines, self._local_names)
        self.local = next(iter(local))
        """Name of the PD cluster."""
        self._prices = profiles.price_per_tb
        self.price_per_tb = {ends: self._price(*ends) for ends in self.links()}
        """Price of 10**12 bytes by link."""
        recompute = profiles.local.local_prefill_ns if profiles.local else None
        links, tokens = profiles.link_bits_per_s.values(), deployment.routing.state_checkpoints
        self.checkpoints = CheckpointRule.planned(tokens, recompute, links)
        self.split = make_split(deployment, profiles)
        self.has_roles = self.split is not None
        self.dispatcher = make_dispatcher(
            deployment, profiles, has_roles=self.has_roles, calibration=calibration
        )
        for name in self._pool_of:
            self._apply(name, 0)
        for ends in self.links():
            self.dispatcher.set_link(*ends, up=False)

    # Members

    def add_engine(
        self, cluster: str, member: ClusterMember, role: EngineRole, now_ns: int
    ) -> list[LinkName]:
        """An engine joins a cluster; it is not ready. Return the links that this makes."""
        self._pool_of[member.name], self.states.cluster_of[member.name] = member.pool, cluster
        split, is_local = self.split, cluster in self._local_names
        if split is not None and is_local:
            split.add(member.name, Role(role.value), now_ns)
        decode = decode_name(member.name) if is_local else ""
        self.dispatcher.add(self.local if is_local else cluster, member, decode)
        links = self._pool_links.add(member.name, member.pool, cluster)
        for source, destination in links:
            self._apply_link(source, destination)
            self.price_per_tb.setdefault((source, destination), self._price(source, destination))
        self._describe(member.name)
        return links

    def _price(self, source: str, destination: str) -> float:
        cluster = self._pool_links.cluster_of(source)
        is_inside = cluster == self._pool_links.cluster_of(destination)
        return 0.0 if is_inside else self._prices.get(cluster, 0.0)

    def remove_engine(self, name: str, now_ns: int) -> None:
        """An engine that no open request uses has left."""
        self.dispatcher.remove(name, now_ns, decode_name(name))
        if self.split is not None and name in self.split:
            self.split.remove(name)
        self._pool_links.remove(name, self._pool_of[name])
        for known in (self._pool_of, self._lengths):
            known.pop(name, None)
        self.states.remove(name)
        self.index.forget(name)

    def remove_pool(self, pool: str) -> None:
        """A pool node that no open request uses has left."""
        self._views.pop(pool, None)
        self.states.withheld.discard(pool)
        self.index.forget(pool)
        self.dispatcher.remove_pool(pool)

    def set_withheld(self, name: str, now_ns: int, *, withheld: bool) -> None:
        """An engine gets nothing new, or a pool node no new transfers, whatever they report."""
        (self.states.withheld.add if withheld else self.states.withheld.discard)(name)
        if name in self.states.cluster_of:
            self._apply(name, now_ns)
        else:
            self._set_links(name)

    # Engines

    def engine_ready(self, name: str, max_model_len: int, now_ns: int) -> None:
        """An engine is well, and takes sequences of this number of tokens."""
        self._lengths[name] = max_model_len
        self._describe(name)
        self.states.healthy.add(name)
        self._apply(name, now_ns)

    def engine_gone(self, name: str, now_ns: int) -> None:
        """An engine does not answer."""
        self.states.healthy.discard(name)
        self._apply(name, now_ns)

    def set_drained(self, name: str, now_ns: int, *, drained: bool) -> None:
        """The operator wants an engine to get nothing new, however well it is, or again."""
        (self.states.drained.add if drained else self.states.drained.discard)(name)
        self._apply(name, now_ns)

    def set_paused(self, name: str, now_ns: int, *, paused: bool) -> None:
        """A purge wants an engine to get nothing new for a while, or again."""
        (self.states.paused.add if paused else self.states.paused.discard)(name)
        self._apply(name, now_ns)

    def set_cluster(self, cluster: str, now_ns: int, *, on: bool) -> None:
        """The operator wants no engine of a cluster to get anything new, or again."""
        (self.states.clusters_off.discard if on else self.states.clusters_off.add)(cluster)
        for name in self.states.of(cluster):
            self._apply(name, now_ns)

    def takes(self, name: str) -> bool:
        """Return True if an engine gets new requests."""
        return self.states.takes(name)

    def is_drained(self, name: str) -> bool:
        """Return True if the operator has drained an engine."""
        return name in self.states.drained

    def engine_seen(
        self, name: str, num_waiting: int, now_ns: int, num_running: int | None = None
    ) -> None:
        """Handle an engine's report of waiting requests, and possibly of running ones."""
        if self.split is not None and name in self.split:
            self.split.loads.report(name, InstanceQueue(now_ns, num_running, num_waiting))
            if not self.split.prefills(name):
                return
        self.dispatcher.report_load(name, now_ns, num_waiting)
        if num_waiting:
            self._look_up(self.dispatcher.requests.due(name, num_waiting), now_ns)

    # Pools and links

    def pool_seen(self, pool: str, view: PoolView, now_ns: int) -> list[int]:
        """Handle a pool node's report, or its loss; returns requests whose blocks were in transit
        over links that broke."""
        self._views[pool] = view
        for layout in view.layouts.values():
            self.dispatcher.expect_bytes(layout, now_ns)
        self.dispatcher.rooms.set_capacity(pool, view.memory_bytes)
        for name in self._pool_links.engines_of(pool):
            self._describe(name)
        for source, destination in self.links(pool):
            if pool == source and (measured := view.telemetry.get(destination)) is not None:
                report = link_report(measured, now_ns)
                self.dispatcher.links.report(source, destination, report)
        return self._set_links(pool)

    # Requests

    def route(self, arrival: Arrival, now_ns: int) -> tuple[Routed | RefusedRequest, Considered]:
        """Decide for a request, and return the routes that were considered with the decision."""
        found, considered = self._route(arrival, self.looked_up(arrival), now_ns)
        if isinstance(found, RefusedRequest):
            self.num_late += found.reason is RefusalReason.PREDICTED_LATE
        if self.split is not None:
            new = found.decision.num_new_tokens
            self.split.roles.mixes.came(now_ns, new, arrival.num_prompt_tokens)
        return found, considered

    def as_now(self, number: int, avoid: str, *, offloadable: bool) -> Arrival:
        """An open request as it would arrive now."""
        arrival = self._asked[number]
        offloadable = offloadable and arrival.offloadable
        return self.looked_up(arrival._replace(avoid=avoid, offloadable=offloadable))

    def hits(self, number: int) -> Mapping[str, int]:
        """Usable cached prefix of an open request by source, tokens; certain hits alone."""
        arrival = self._asked.get(number)
        return {} if arrival is None else self.cached(arrival)[0]

    def spared(self, avoid: str) -> str | None:
        """A PD engine that is well and kept from requests by its breaker alone."""
        local = (
            name for name, cluster in self.states.cluster_of.items() if cluster in self._local_names
        )
        found = (name for name in local if name in self.states.healthy and name in self._broken)
        return next(
            (name for name in found if name != avoid and not self.states.is_barred(name)), None
        )

    def choose_decode(self, number: int, avoid: str = "") -> str | None:
        """The engine that decodes a request, chosen when first asked for; returns none when nobody
        can, or the request is over.

        Args:
            avoid: Engine that was tried already.
        """
        if self.split is None:
            return self.dispatcher.requests.choose_decode(number)
        tried = decode_name(avoid) if avoid else ""
        name = self.dispatcher.requests.choose_decode(number, tried)
        return instance_of(name) if name else None

    def lane(self, name: str) -> str:
        """Name of the dispatcher for a PD engine as one that prefills what it decodes."""
        split = self.split
        is_apart = split is not None and name in split and not split.prefills(name)
        return decode_name(name) if is_apart else name

    # Steps

    def _apply(self, name: str, now_ns: int) -> None:
        self.states.note(name)
        takes = self.states.takes(name)
        if self.split is None or name not in self.split:
            self.dispatcher.set_ready(name, ready=takes, now_ns=now_ns)
            return
        self.split.set_usable(name, usable=takes)
        self.apply_roles(now_ns)

    def apply_roles(self, now_ns: int) -> None:
        """PD engines take what their role allows."""
        for name, ready in self.split.ready() if self.split else ():
            self.dispatcher.set_ready(name, ready=ready, now_ns=now_ns)

    def _describe(self, name: str) -> None:
        view = self._views.get(self._pool_of[name], PoolView())
        layout = view.layouts.get(name)
        self.dispatcher.describe(
            name,
            num_tokens_max=self._lengths.get(name, 0),
            layout_id=None if layout is None else layout.layout_id,
        )

    def links(self, pool: str | None = None) -> list[LinkName]:
        """Links to the PD cluster and between hosts of a cluster: all, or those of a pool."""
        return self._pool_links.all() if pool is None else self._pool_links.of(pool)

    def _set_links(self, pool: str) -> list[int]:
        return [number for ends in self.links(pool) for number in self._apply_link(*ends)]

    def _apply_link(self, source: str, destination: str) -> list[int]:
        """A transfer has to be able to begin, and to be followed at both ends."""
        ends = [self._views.get(pool, PoolView()) for pool in (source, destination)]
        why_down = None
        if not all(end.is_live for end in ends):
            why_down = Reason.POOL_NOT_CONNECTED
        elif any(e.is_draining for e in ends) or not self.states.withheld.isdisjoint(
            (source, destination)
        ):
            why_down = Reason.POOL_DRAINING
        elif not ends[0].links.get(destination, False):
            why_down = Reason.LINK_DOWN
        elif (source, destination) in self._broken:
            why_down = Reason.LINK_BARRED
        if why_down is None:
            return self.dispatcher.set_link(source, destination, up=True)
        return self.dispatcher.set_link(source, destination, up=False, why_down=why_down)

    def parts_behind(self, reason: Reason, cluster: str) -> str:
        """Return the parts that are behind an obstacle on the way to a PrfaaS cluster, as text.

        Returns:
            Up to `NAMED_MAX` names; "" if the reason does not come from a part.
        """
        if reason is Reason.NO_PREFILL_INSTANCE:
            found = (
                f"{name} {self.states.why_unused(name)}"
                for name in self.states.of(cluster)
                if not self.states.takes(name)
            )
        elif reason is Reason.ENGINE_NOT_CONNECTED:
            found = (
                f"{name} is not connected to {self._pool_of[name]}"
                for name, at in self.states.cluster_of.items()
                if (at == cluster or at in self._local_names)
                and name in self.states.healthy
                and name not in self._views.get(self._pool_of[name], PoolView()).layouts
            )
        elif reason in UNREACHABLE:
            pools = {self._pool_of[name] for name in self.states.of(cluster)}
            found = (
                f"{link.source} to {link.destination}"
                for link in self.dispatcher.links
                if link.source in pools and link.why_down is reason
            )
        else:
            return ""
        return ", ".join(islice(found, NAMED_MAX))

    def looked_up(self, arrival: Arrival) -> Arrival:
        """A request with what is cached of it now."""
        hits, hints = self.cached(arrival)
        return arrival._replace(hits=hits, hints=hints)

    def cached(self, arrival: Arrival) -> tuple[Hits, Hits]:
        """Usable cached prefix by source, tokens: certain hits, and hints."""
        if arrival.layout is None or not arrival.hashes:
            return {}, {}
        return self.index.hits(arrival.layout, arrival.hashes, arrival.num_prompt_tokens)


def link_report(measured: LinkTelemetry, now_ns: int) -> LinkReport:
    """Counters of a link as a pool node sent them, which arrive now.

    A pool node reports rates of transmitted bytes; routes count bytes of blocks.
    """
    ratio = measured.coding_ratio
    return LinkReport(
        now_ns - measured.age_ns,
        measured.goodput_bits_per_s * ratio,
        measured.open_arrived_bytes,
        measured.busy_ns,
        measured.rtt_ns,
        measured.budget_bits_per_s * ratio,
    )
