"""The pool node: one store, local engines on one side, other pools and gateways on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import msgspec

from prfaas.core.cache.tenant_shares import Share
from prfaas.core.facts import FactStream
from prfaas.core.transfer.facts import EnginesChanged, HousekeepingDone, LinksChanged, TransferDone
from prfaas.core.transfer.site_budget import Lease
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.engine.engine_server import ConnectedEngines
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.admin_http import AdminServer, NodePhase
from prfaas.pool.node.engine_room import EngineRoom
from prfaas.pool.node.keeping import Keeping, KeptTiers
from prfaas.pool.node.link_room import LinkRoom
from prfaas.pool.node.own_site import OwnSite
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.node.store_room import OpenShared, StoreRoom
from prfaas.wire.channel import Channel
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.codec import OfGateway
from prfaas.wire.messages.gateway import (
    LinkLease,
    Order,
    PoolState,
    Subscribe,
    TierUse,
    TransferEnded,
)
from prfaas.wire.messages.layouts import LayoutFacts, bounded
from prfaas.wire.messages.link import Abort, Pull, Release
from prfaas.wire.messages.survey import ENGINES_MAX, Survey, Surveyed

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
Execute = Callable[[Any, str, Callable[[Message], None]], None]
"""Executes a message of a gateway: the message, the gateway, and where the answer goes."""


class PoolNode:
    """A pool node: the rooms for blocks, links, engines and orders of gateways.

    Args:
        site: The parts that it knows, and what they may do.
        facts: Told what happens; annexes subscribe.
        open_shared: Opens the tier of the site; None without one.
        kernels: Kernels of link codecs; the default is that of the process.

    Raises:
        ConfigError: The host has less than the settings allow, or a file cannot be used.
    """

    def __init__(
        self,
        site: OwnSite,
        facts: FactStream,
        metrics: PoolMetrics,
        open_shared: OpenShared | None = None,
        kernels: Kernels = KERNELS,
    ) -> None:
        self.settings: PoolSettings = site.settings
        self.sites, self.feed = site, site.feed
        self.facts, self.metrics = facts, metrics
        engines = ConnectedEngines()
        self.store_room = StoreRoom(site, metrics, open_shared)
        self.link_room = LinkRoom(site, facts, metrics, self.store_room, engines, self, kernels)
        self.engine_room = EngineRoom(
            site, facts, metrics, self.store_room, self.link_room, engines
        )
        rooms = self.store_room
        tiers = KeptTiers(rooms.memory, rooms.disk, rooms.shared)
        self.keeping = Keeping(tiers, self.link_room, metrics, facts, self.settings)
        self.store, self.disk = self.store_room.memory, self.store_room.disk
        self.inbound, self.links = self.link_room.inbound, self.link_room.links
        self.link_port, self.peers = self.link_room.port, self.link_room.peers
        self.store_room.watch(metrics)
        self.link_room.watch(metrics)
        self._other_orders: dict[type[Message], Execute] = {}
        self._one_ended = asyncio.Event()
        self._told: tuple[dict[str, TierUse], int] | None = None
        """Tiers and leases as last reported to gateways."""
        self._is_open = False
        self.admin_port = 0
        """Port of `/health` and `/metrics`, once it is open."""
        facts.subscribe(TransferDone, self._transfer_done)
        facts.subscribe(LinksChanged, lambda _: self._state_changed())
        facts.subscribe(EnginesChanged, lambda _: self.feed.state_changed(self._whole_state()))

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until cancelled; ConfigError if a port is taken, or the socket cannot be made.

        Args:
            ready: Called once all ports are open.
        """
        self.store.room.share(self.sites.shares)
        admin = AdminServer(self.metrics, self.settings.admin, lambda: self.phase)
        engine_port = self.engine_room.port
        try:
            # First, so that probes get "starting" while the other ports open.
            await _open_port(admin.open, self.settings.admin)
            self.admin_port = admin.port
            engine_port.open()
            await _open_port(self.link_port.open, self.settings.listen)
            async with asyncio.TaskGroup() as tasks:
                self.peers.run(tasks)
                tasks.create_task(engine_port.run())
                tasks.create_task(self._keep_house())
                self.store_room.run(tasks)
                tasks.create_task(self.keeping.run())
                log.info(
                    "pool node %s: links at %s:%d, engines at %s, health and metrics at %s",
                    self.settings.name,
                    self.settings.listen[0],
                    self.link_port.port,
                    self.settings.socket_path,
                    admin.url,
                )
                self._is_open = True
                ready()
        finally:
            engine_port.close()
            await self.link_room.close()
            self.engine_room.requests.close()
            await admin.close()
            await self.store_room.close()

    async def drain(self, limit_s: float) -> None:
        """Take no new transfers, and wait until those under way have ended.

        Gateways are notified, and send no more requests.
        """
        self.link_room.tickets.is_draining = True
        self._state_changed()
        log.info("no new transfers are accepted; %d are running", self.link_room.num_open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.link_room.num_open:
                    self._one_ended.clear()
                    await self._one_ended.wait()

    @property
    def phase(self) -> NodePhase:
        """State of the node."""
        if self.link_room.io.has_failed:
            return NodePhase.FAILED
        if self.link_room.tickets.is_draining:
            return NodePhase.DRAINING
        return NodePhase.READY if self._is_open else NodePhase.STARTING

    def validate(self) -> None:
        """See that blocks, transfers and pushes are counted once in all rooms; AssertionError if
        one is not."""
        self.store.validate()
        self.link_room.validate()
        self.engine_room.pushes.validate()

    # --- what gateways order ---

    def take_orders(self, kind: type[Message], execute: Execute) -> None:
        """Have an annex execute messages of gateways of one type."""
        self._other_orders[kind] = execute

    def ordered(self, channel: Channel, message: OfGateway) -> None:
        """Execute a message of a gateway."""
        gateway, answer = channel.peer, channel.send
        if not self.sites.allows(gateway, message, answer):
            return
        match message:
            case Survey():
                answer(self._surveyed())
            case Subscribe():
                self._subscribed(channel, message)
            case Pull():
                self.inbound.pull(message, answer)
            case Abort():
                self.link_room.abort(message.transfer_id, message.reason)
            case Release():
                self.inbound.release(message.transfer_id)
            case Order():
                self.keeping.ordered(message, gateway, answer)
            case LinkLease():
                lease = Lease(message.bits_per_s, message.for_ns)
                self.link_room.share.take(gateway, lease)
            case _ if type(message) in self._other_orders:
                self._other_orders[type(message)](message, gateway, answer)

    def gateway_left(self, channel: Channel) -> None:
        """A connection is closed, of a gateway or a pool."""
        self.feed.unsubscribe(channel)

    def shows_load(self, peer: str) -> bool:
        """Return True if a peer may know how busy this node is: it is of this site."""
        return self.sites.site_of(peer) is None

    def _subscribed(self, channel: Channel, message: Subscribe) -> None:
        gateway, site = channel.peer, self.sites
        ages = {tag: age for tag, age in message.ages.items() if site.claims(gateway, tag)}
        shares = {tag: Share(*share) for tag, share in message.shares.items() if tag}
        self.keeping.announced(gateway, ages, None if site.is_shared else shares)
        self.feed.subscribe(channel, self.store, self._whole_state)

    # --- what gateways are told ---

    def _whole_state(self) -> PoolState:
        """The complete state, for a new gateway."""
        facts = bounded(
            LayoutFacts(
                layout_id=engine.layout.layout_id,
                facts=engine.hello.facts,
                model=engine.hello.model,
            )
            for engine in self.engine_room.engines.values()
        )
        return msgspec.structs.replace(self._state(), facts=facts)

    def _state(self) -> PoolState:
        """State that can change; facts of a layout never do."""
        order, links, engines = self.store.order, self.links, self.engine_room.engines
        # With contracts memory is counted by site, and a gateway of this site reads tags there.
        tenants = {} if self.sites.is_shared else self.store_room.tenants()
        return PoolState(
            seq=0,
            layouts={name: engine.hello.layout for name, engine in engines.items()},
            links={peer: link.is_up for peer, link in links.items()},
            telemetry={peer: link.telemetry for peer, link in links.items()},
            is_draining=self.link_room.tickets.is_draining,
            tiers=self.store_room.uses(),
            tenants=tenants,
            num_leased=order.num_leased,
            leased_bytes=order.leased_bytes,
        )

    def _surveyed(self) -> Surveyed:
        """Answer to a survey."""
        engines = dict(islice(self.engine_room.engines.items(), ENGINES_MAX))
        return Surveyed(
            layouts={name: engine.hello.layout for name, engine in engines.items()},
            shapes={name: engine.hello.shape for name, engine in engines.items()},
            facts=self._whole_state().facts,
        )

    def _state_changed(self) -> None:
        self.feed.state_changed(self._state())

    def _transfer_done(self, fact: TransferDone) -> None:
        self._one_ended.set()
        direction, transfer, now_ns = fact.direction, fact.transfer, fact.now_ns
        self.metrics.transfers.labels(direction=direction, state=transfer.state).inc()
        log_event(
            log,
            logging.INFO,
            "transfer_ended",
            transfer=transfer.transfer_id.hex(),
            direction=direction,
            peer=transfer.peer,
            state=str(transfer.state),
            blocks=transfer.num_blocks,
            bytes=transfer.num_bytes,
            why=transfer.reason or None,
        )
        self.feed.transfer_ended(
            TransferEnded(
                seq=0,
                transfer_id=transfer.transfer_id,
                direction=direction,
                peer=transfer.peer,
                kind=transfer.end or TransferEnd.ABORTED,
                reason=transfer.reason,
                num_blocks=transfer.num_blocks,
                num_bytes=transfer.num_bytes,
                duration_ns=now_ns - transfer.opened_at_ns,
                last_block_age_ns=now_ns - (transfer.last_block_at_ns or now_ns),
                num_missing=transfer.num_missing,
            )
        )

    async def _keep_house(self) -> None:
        clock_ns = self.settings.clock_ns
        while True:
            self.store.room.spill(again=True)
            self.store.expire(clock_ns())
            self.inbound.expire()
            self.keeping.expire()
            self.peers.expire()
            self.facts.report(HousekeepingDone(clock_ns()))
            if self.link_room.follow_site():
                self.store.room.share(self.sites.shares)
                self._state_changed()
            self.link_room.share.apply()
            self._tell_of_tiers()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _tell_of_tiers(self) -> None:
        holds = self.store_room.uses(), self.store.order.num_leased
        if self.feed.num_subscribers and holds != self._told:
            self._told = holds
            self._state_changed()


async def _open_port(start: Callable[[], Awaitable[None]], address: tuple[str, int]) -> None:
    try:
        await start()
    except OSError as error:
        host, port = address
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
