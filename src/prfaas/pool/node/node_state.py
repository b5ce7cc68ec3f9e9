"""State of a pool node as others read it: gateways by messages, operators by gauges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nlargest
from itertools import islice

import msgspec

from prfaas.pool.engine.engine_server import EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.receive.link_server import LinkPort
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.memory_room import MemoryRoom
from prfaas.pool.store.tier_ports import SharedTier
from prfaas.wire.messages.fields import TENANTS_HELD_MAX
from prfaas.wire.messages.gateway import PoolState, TenantUse, TierUse
from prfaas.wire.messages.layouts import LayoutFacts, bounded
from prfaas.wire.messages.survey import ENGINES_MAX, Surveyed

HOST, DISK, SHARED = "host", "disk", "shared"
"""Tiers: labels of metrics, and names in reports to gateways."""


class NodeState:
    """Composes the state of a node from its parts.

    Args:
        store: Blocks in memory.
        disk: The disk tier; None without.
        shared: The tier of the site; None without.
        engines: Connected engines, by name.
        links: Links to peers, by name.
        is_draining: Returns True if no new transfers are taken.
        shows_tenants: False with contracts: memory is counted by site then, and a gateway of this
            site reads tags there.
    """

    def __init__(
        self,
        store: BlockStore,
        disk: DiskTier | None,
        shared: SharedTier | None,
        engines: Mapping[str, EngineSession],
        links: Mapping[str, OutboundLink],
        is_draining: Callable[[], bool],
        *,
        shows_tenants: bool,
    ) -> None:
        self._store, self._disk, self._shared = store, disk, shared
        self._engines, self._links = engines, links
        self._is_draining, self._shows_tenants = is_draining, shows_tenants

    def whole(self) -> PoolState:
        """The complete state, for a new gateway."""
        facts = bounded(
            LayoutFacts(
                layout_id=engine.layout.layout_id,
                facts=engine.hello.facts,
                model=engine.hello.model,
            )
            for engine in self._engines.values()
        )
        return msgspec.structs.replace(self.changes(), facts=facts)

    def changes(self) -> PoolState:
        """State that can change; facts of a layout never do."""
        return PoolState(
            seq=0,
            layouts={name: engine.hello.layout for name, engine in self._engines.items()},
            links={peer: link.is_up for peer, link in self._links.items()},
            telemetry={peer: link.telemetry for peer, link in self._links.items()},
            is_draining=self._is_draining(),
            tiers=self.tiers(),
            tenants=self._tenants() if self._shows_tenants else {},
            num_leased=self._store.order.num_leased,
            leased_bytes=self._store.order.leased_bytes,
        )

    def surveyed(self) -> Surveyed:
        """Answer to a survey."""
        engines = dict(islice(self._engines.items(), ENGINES_MAX))
        return Surveyed(
            layouts={name: engine.hello.layout for name, engine in engines.items()},
            shapes={name: engine.hello.shape for name, engine in engines.items()},
            facts=self.whole().facts,
        )

    def tiers(self) -> dict[str, TierUse]:
        """Use of each tier."""
        return {
            name: TierUse(
                used_bytes=tier.used_bytes,
                capacity_bytes=tier.capacity_bytes,
                num_blocks=len(tier),
            )
            for name, tier in self._tiers()
        }

    def _tenants(self) -> dict[str, TenantUse]:
        """Bytes of tenants by tag: of those that hold the most, TENANTS_HELD_MAX at most."""
        in_memory = self._store.room.held_bytes
        on_disk: Mapping[str, int] = {} if self._disk is None else self._disk.held_bytes

        def held(tag: str) -> int:
            return in_memory.get(tag, 0) + on_disk.get(tag, 0)

        tags = nlargest(TENANTS_HELD_MAX, (in_memory.keys() | on_disk.keys()) - {""}, held)
        return {
            tag: TenantUse(host_bytes=in_memory.get(tag, 0), disk_bytes=on_disk.get(tag, 0))
            for tag in tags
        }

    def watch(self, metrics: PoolMetrics, inbound: InboundTransfers, link_port: LinkPort) -> None:
        """Have gauges read at each scrape."""
        room, order, links = self._store.room, self._store.order, self._links
        for name, tier in self._tiers():
            _watch_tier(metrics, name, tier)
        if (disk := self._disk) is not None:
            metrics.tenant_keys.set_function(lambda: disk.num_keys)
        metrics.loose_bytes.set_function(lambda: room.loose_bytes)
        metrics.leased_blocks.set_function(lambda: order.num_leased)
        metrics.leased_bytes.set_function(lambda: order.leased_bytes)
        metrics.pinned_bytes.set_function(lambda: order.pinned_bytes)
        metrics.pinned_blocks.set_function(lambda: room.num_pinned)
        metrics.promised_bytes.set_function(lambda: inbound.known.promised_bytes)
        metrics.unfinished_bytes.set_function(lambda: link_port.data.unfinished_bytes)
        received, sent = (metrics.open_transfers.labels(direction=d) for d in ("received", "sent"))
        received.set_function(lambda: inbound.known.num_open)
        sent.set_function(lambda: sum(link.num_open for link in links.values()))

    def _tiers(self) -> list[tuple[str, MemoryRoom | DiskTier | SharedTier]]:
        tiers = ((HOST, self._store.room), (DISK, self._disk), (SHARED, self._shared))
        return [(name, tier) for name, tier in tiers if tier is not None]


def _watch_tier(metrics: PoolMetrics, name: str, tier: MemoryRoom | DiskTier | SharedTier) -> None:
    metrics.capacity_bytes.labels(tier=name).set(tier.capacity_bytes)
    metrics.used_bytes.labels(tier=name).set_function(lambda: tier.used_bytes)
    metrics.blocks.labels(tier=name).set_function(lambda: len(tier))
