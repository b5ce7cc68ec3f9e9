"""The pool node: one store, local engines on one side, other pools and gateways on the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prfaas.audit.pool_audit import PoolAudit
from prfaas.billing.storage_meter import MeteredTier, StorageMeter
from prfaas.core.cache.keep_rules import KeepRules, Origin
from prfaas.core.cache.tenant_shares import Share
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.facts import FactStream
from prfaas.core.kv.blocks import BlockName
from prfaas.core.transfer.site_budget import Lease
from prfaas.core.transfer.tickets import AcceptedTicket, RefusedTicket, TicketUse
from prfaas.core.transfer.transfer_state import ChangedLink, EndedTransfer, Transfer, TransferEnd
from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.engine.connected_engines import ConnectedEngines
from prfaas.pool.engine.engine_requests import EngineRequests
from prfaas.pool.engine.engine_server import EnginePort, EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.net.link_probe import ProbeSink
from prfaas.pool.node.admin_http import AdminServer, NodePhase
from prfaas.pool.node.comparing import Comparing
from prfaas.pool.node.disk_keys import disk_wrapper
from prfaas.pool.node.host_limits import check_limits
from prfaas.pool.node.keeping import Keeping, KeptTiers
from prfaas.pool.node.node_state import DISK, HOST, NodeState
from prfaas.pool.node.peers import Peers
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.node.transfer_spans import RECEIVED, SENT, TransferSpans
from prfaas.pool.receive.data_port import DataPort
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.receive.link_server import LinkPort
from prfaas.pool.send.block_sender import Sending
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.outbound_link import OutboundLink, SiteShare
from prfaas.pool.shared.opening import open_shared
from prfaas.pool.sites.sites import Sites
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_segments import SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.tier_ports import SharedTier
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.wire.allow_list import AllowList
from prfaas.wire.channel import Channel
from prfaas.wire.messages.codec import OfGateway
from prfaas.wire.messages.comparing import Compare
from prfaas.wire.messages.gateway import (
    LinkLease,
    Order,
    Subscribe,
    TierUse,
    TransferEnded,
)
from prfaas.wire.messages.link import Abort, Pull, Release
from prfaas.wire.messages.survey import Survey
from prfaas.wire.tickets import TicketOpener

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5


class PoolNode:
    """Wires the parts of a pool node together.

    Args:
        settings: Identity, resources, peers and limits.
        kernels: Kernels of link codecs; the default is that of the process.

    Raises:
        ConfigError: The host has less than the settings allow.
    """

    _is_opener_due = False
    """True while the authorities of changed contracts are not in force for tickets."""

    def __init__(
        self,
        settings: PoolSettings,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        kernels: Kernels = KERNELS,
    ) -> None:
        check_limits(settings.memory_bytes, settings.disk, settings.disk_bytes)
        self.settings = settings
        self.metrics, self.facts = PoolMetrics(), FactStream()
        self._audit = PoolAudit(
            settings.audit, settings.name, self.metrics.audit, self.metrics.moved, clock_ns
        )
        self.sites = Sites(settings, self._origin_of, lambda: self.store.room.held_bytes)
        self._follow_facts()
        self.feed = self.sites.feed
        self.store = BlockStore(
            settings.memory_bytes,
            self.feed,
            self.sites.order_of(settings.memory_bytes),
            rules=KeepRules(settings.name, settings.regions, settings.wall_s),
        )
        self.disk = self._disk(settings.disk) if settings.disk else None
        self._clock_ns = clock_ns
        self._engines = ConnectedEngines()
        self._spans = TransferSpans(settings.tracing, settings.name)
        self._one_ended = asyncio.Event()
        self._told: tuple[dict[str, TierUse], int] | None = None
        """Tiers and leases as last reported to gateways."""
        self._dialling, self._accepting = (
            settings.identity.dialling(),
            settings.identity.accepting(),
        )
        self.sites.trust(self._dialling, self._accepting)
        self._opener = TicketOpener(
            settings.identity.authority, self.sites.gateways, self.sites.certificates
        )
        settings.check_certificate()
        own: list[tuple[str, MeteredTier | None]] = [(HOST, self.store.room), (DISK, self.disk)]
        tiers = {name: tier for name, tier in own if tier is not None}
        self._storage = StorageMeter(tiers, self._audit.record, self.metrics.storage, clock_ns())
        self._tickets = TicketChecks(
            settings.name,
            self._opener,
            self.metrics,
            self.facts,
            settings.regions,
        )
        sources, hosts = (
            AllowList(names, self.sites.prove) for names in (settings.sources, settings.hosts)
        )
        self.shared: SharedTier | None = None
        read_limit_s: float | None = None
        if settings.shared is not None:
            read_limit_s = settings.shared.read_limit_s
            self.shared = open_shared(
                settings.shared, settings.name, hosts, self.metrics, self.store
            )
        self._io = IoThread(settings.link_lanes)
        self._end = LinkEnd(
            settings.name,
            self.feed.epoch,
            self._io,
            self.metrics,
            settings.link_encryption,
            settings.link_grace_ns,
            settings.send,
        )
        self.inbound = InboundTransfers(
            self._end,
            self.store,
            self.facts,
            self._tickets,
            self._engines,
            settings.receive,
            hosts,
            settings.wall_s,
        )
        self._sending = Sending(self.store, self._tickets, read_limit_s)
        self._known_layouts, self._kernels = KnownLayouts(self._load_codecs), kernels
        self._decoding = Decoding(settings.link_codec, self._known_layouts, self.metrics, kernels)
        self.links = {peer: self._link(peer, *how) for peer, how in self.sites.peers.items()}
        self._site_share, self._comparing = (
            SiteShare(settings.site_budget, settings.site, self.links),
            Comparing(self.store, self._known_layouts),
        )
        self.keeping = Keeping(
            KeptTiers(self.store, self.disk, self.shared),
            self._known_layouts,
            self.inbound,
            self.links,
            self.metrics,
            self._audit,
            settings,
            clock_ns,
        )
        self.link_port = LinkPort(
            settings.listen,
            self._accepting,
            DataPort(self._end, self._accepting.data, sources, self.inbound, self._decoding),
            ProbeSink(
                self._accepting.probe, sources, self._io, self.metrics.link_refused, settings.probes
            ),
            self.sites.gateways,
            self,
            settings.channels,
        )
        self.peers = Peers(
            settings,
            self.links,
            self._link,
            sources,
            hosts,
            self.inbound,
            self.link_port,
            self.metrics,
            self._links_changed,
        )
        self._requests = EngineRequests(
            settings.name,
            self.store,
            self.inbound,
            self.links,
            self._tickets,
            self._push_refused,
            self._sending,
            self.metrics,
            read_limit_s,
            needs_grant=settings.needs_grant,
            is_shared=self.sites.is_shared,
            wall_s=settings.wall_s,
        )
        self._engine_port = EnginePort(
            settings.socket_path,
            self._engine_came,
            self._requests.handle,
            self._engine_went,
            settings.hello_timeout_s,
        )
        self._state = NodeState(
            self.store,
            self.disk,
            self.shared,
            self._engines,
            self.links,
            lambda: self._tickets.is_draining,
            shows_tenants=not self.sites.is_shared,
        )
        self._state.watch(self.metrics, self.inbound, self.link_port)
        self._is_open = False
        self.admin_port = 0
        """Port of `/health` and `/metrics`, once it is open."""

    def _follow_facts(self) -> None:
        self.facts.guard(TicketUse, self._audit.allow)
        self.facts.guard(TicketUse, lambda use: self.sites.check_ticket(*use))
        self.facts.subscribe(AcceptedTicket, lambda fact: self._audit.granted(fact.ticket))
        self.facts.subscribe(RefusedTicket, lambda fact: self._audit.refused(*fact))
        self.facts.subscribe(EndedTransfer, lambda fact: self._transfer_ended(*fact))
        self.facts.subscribe(ChangedLink, lambda _: self._state_changed())

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until cancelled.

        Args:
            ready: Called once all ports are open.

        Raises:
            ConfigError: A port is taken, or the socket cannot be made.
        """
        self.store.room.share(self.sites.shares)
        self._audit.site_of = self.sites.site_of_gateway
        admin = AdminServer(self.metrics, self.settings.admin, lambda: self.phase)
        try:
            # First, so that probes get "starting" while the other ports open.
            await _open_port(admin.open, self.settings.admin)
            self.admin_port = admin.port
            self._engine_port.open()
            await _open_port(self.link_port.open, self.settings.listen)
            async with asyncio.TaskGroup() as tasks:
                self.peers.run(tasks)
                tasks.create_task(self._engine_port.run())
                tasks.create_task(self._keep_house())
                if self.disk is not None:
                    tasks.create_task(self.disk.run())
                if self.shared is not None:
                    tasks.create_task(self.shared.run())
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
            self._engine_port.close()
            await self.link_port.close()
            await self._io.close()
            self._requests.close()
            await admin.close()
            if self.disk is not None:
                await self.disk.close()
            if self.shared is not None:
                await self.shared.close()
            await self._comparing.close()
            self._storage.close(self._clock_ns())
            await asyncio.to_thread(self._audit.close)
            if self.settings.tracing is not None:
                await asyncio.to_thread(self._spans.close)

    def _load_codecs(self) -> None:
        """Load the kernels: an engine has blocks that a link of this node can code."""
        if self.settings.link_codec is not LinkCodec.RAW and self.peers.may_exist:
            loop = asyncio.get_running_loop()

            def ready() -> None:
                self.metrics.set_codec(self._kernels.speed)
                with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                    loop.call_soon_threadsafe(self._decoding.kernels_ready)

            self._kernels.load(ready)

    async def drain(self, limit_s: float) -> None:
        """Take no new transfers, and wait until those under way have ended.

        Gateways are notified, and send no more requests.
        """
        self._tickets.is_draining = True
        self._state_changed()
        log.info("no new transfers are accepted; %d are running", self.num_open)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.num_open:
                    self._one_ended.clear()
                    await self._one_ended.wait()

    def renew_identity(self) -> None:
        """Load the files of the identity and of the authority; links stay open.

        Raises:
            ConfigError: They cannot be used; nothing is changed.
        """
        self.settings.check_certificate()
        identity, ends = self.settings.identity, (self._dialling, self._accepting)
        identity.refresh(*(tls.messages for tls in ends))
        self.sites.trust(*ends, self._io.call)
        self._opener.renew()
        self._io.call(self._renew_data)

    def _renew_data(self) -> None:
        """The same for the connections of the I/O thread, on that thread."""
        ends = (self._dialling, self._accepting)
        contexts = [context for tls in ends for context in (tls.data, tls.probe)]
        try:
            self.settings.identity.refresh(*contexts)
        except ConfigError as error:
            # The files were changed again meanwhile; the next SIGHUP loads them.
            log_event(log, logging.ERROR, "identity_kept", why=str(error))

    @property
    def phase(self) -> NodePhase:
        """State of the node."""
        if self._io.has_failed:
            return NodePhase.FAILED
        if self._tickets.is_draining:
            return NodePhase.DRAINING
        return NodePhase.READY if self._is_open else NodePhase.STARTING

    @property
    def num_open(self) -> int:
        """Transfers under way, in and out."""
        return self.inbound.known.num_open + sum(link.num_open for link in self.links.values())

    def _disk(self, folder: Path) -> DiskTier:
        wrapper, is_new = disk_wrapper(folder, self.settings.disk_keys, self.settings.own_disk_key)
        files = SegmentFiles(folder, self.store.rules.regions, wrapper, is_new_key=is_new)
        disk = DiskTier(
            files,
            self.settings.disk_bytes,
            self.metrics,
            self.store,
            self.settings.disk_limits,
        )
        self.store.tiers.add(disk)
        return disk

    def _link(
        self, peer: str, address: tuple[str, int], budget: int = 0, connections: int = 0
    ) -> OutboundLink:
        settings = self.settings
        to = Destination(
            peer,
            address,
            self._budget(peer, budget),
            connections or settings.link_connections.get(peer, 0),
            AllowList({peer}, self.sites.prove),
        )
        coding = LinkCoding(
            settings.link_codec, self._known_layouts, peer, self.metrics, wall_s=settings.wall_s
        )
        return OutboundLink(
            self._end, to, self._dialling, coding, self._tickets, self._sending, self.facts
        )

    def _budget(self, peer: str, agreed: int) -> int:
        """Budget of a link, bits per second: that of a contract, or else the operator's."""
        return agreed or self.settings.link_budgets.get(peer, 0)

    # --- what gateways order ---

    def ordered(self, channel: Channel, message: OfGateway) -> None:
        """Execute a message of a gateway."""
        gateway, answer = channel.peer, channel.send
        if not self.sites.allows(gateway, message, answer):
            return
        match message:
            case Subscribe() | Survey():
                self._subscribed(channel, message)
            case Pull():
                self.inbound.pull(message, answer)
            case Abort():
                self._abort(message.transfer_id, message.reason)
            case Release():
                self.inbound.release(message.transfer_id)
            case Order():
                self.keeping.ordered(message, gateway, answer)
            case LinkLease():
                self._site_share.take(gateway, Lease(message.bits_per_s, message.for_ns))
            case Compare():
                self._comparing.asked(message, answer)

    def gateway_left(self, channel: Channel) -> None:
        """A connection is closed, of a gateway or a pool."""
        self.feed.unsubscribe(channel)

    def shows_load(self, peer: str) -> bool:
        """Return True if a peer may know how busy this node is: it is of this site."""
        return self.sites.contracts.site_of(peer) is None

    def _subscribed(self, channel: Channel, message: Subscribe | Survey) -> None:
        if isinstance(message, Survey):
            channel.send(self._state.surveyed())
            return
        peer, claims = channel.peer, self.sites.claims
        ages = {tag: age for tag, age in message.ages.items() if claims(peer, tag)}
        shares = {tag: Share(*share) for tag, share in message.shares.items() if tag}
        self.keeping.announced(peer, ages, None if self.sites.is_shared else shares)
        self.feed.subscribe(channel, self.store, self._state.whole)

    def _state_changed(self) -> None:
        self.feed.state_changed(self._state.changes())

    def _links_changed(self) -> None:
        self._site_share.apply()
        self._state_changed()

    def _engine_came(self, session: EngineSession) -> None:
        log_event(log, logging.INFO, "engine_connected", engine=session.name)
        self._engines.add(session)
        self._known_layouts.learn(session.layout)
        if self.shared is not None:
            self.shared.learn(session.layout)
        self.feed.state_changed(self._state.whole())

    def _engine_went(self, session: EngineSession) -> None:
        self._requests.left(session)
        if self._engines.remove(session):
            self.feed.state_changed(self._state.whole())

    def _abort(self, transfer_id: bytes, reason: str) -> None:
        if self.peers.has_sources:
            self.inbound.aborted(transfer_id, reason)
        for link in self.links.values():
            link.abort(transfer_id, TransferEnd.ABORTED, reason)

    def _push_refused(self, transfer_id: bytes, peer: str, reason: str) -> None:
        """Report to the gateway that a ticket does not allow an engine's push."""
        now = self._clock_ns()
        transfer = Transfer(transfer_id, peer, now, now)
        transfer.apply(TransferEnd.REFUSED, reason)
        self._transfer_ended(SENT, transfer)

    def _transfer_ended(self, direction: str, transfer: Transfer) -> None:
        self._one_ended.set()
        if direction == RECEIVED:
            self._requests.transfer_over(transfer.transfer_id)
        else:
            self._sending.ended(transfer.transfer_id)
        now = self._clock_ns()
        self._spans.ended(direction, transfer, now)
        self.sites.ended(transfer.transfer_id)
        self._audit.ended(direction, transfer)
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
                duration_ns=now - transfer.opened_at_ns,
                last_block_age_ns=now - (transfer.last_block_at_ns or now),
                num_missing=transfer.num_missing,
            )
        )

    async def _keep_house(self) -> None:
        while True:
            self.store.room.spill(again=True)
            self.store.expire(self._clock_ns())
            self.inbound.expire()
            self.keeping.expire()
            self._audit.sweep(self._is_moving)
            self._storage.read(self._clock_ns())
            self.peers.expire()
            self._follow_sites()
            self._site_share.apply()
            self._tell_of_tiers()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _follow_sites(self) -> None:
        """Put changed contracts in force: links and connections of sites without one end."""
        if (changed := self.sites.look()) is not None:
            self.sites.trust(self._dialling, self._accepting, self._io.call)
            self.store.room.share(self.sites.shares)
            for peer in changed.gone:
                if peer in self.links:
                    self.links[peer].end()
                    self.peers.remove(peer)
                self.link_port.dismiss(peer)
            for peer, budget in changed.budgets.items():
                if peer in self.links:
                    self.links[peer].control.set_budget(self._budget(peer, budget))
            for peer, (address, budget) in changed.came.items():
                self.peers.add(peer, address, budget)
            self._state_changed()
        if changed is not None or self._is_opener_due:
            self._renew_opener()

    def _renew_opener(self) -> None:
        """Check tickets with the authorities in force; a file that cannot be read is tried again.

        Until then, `Sites.prove` refuses the tickets of sites without a contract.
        """
        try:
            self._opener.renew()
        except ConfigError as error:
            if not self._is_opener_due:
                log_event(log, logging.ERROR, "identity_kept", why=str(error))
            self._is_opener_due = True
        else:
            self._is_opener_due = False

    def _origin_of(self, name: BlockName) -> Origin | None:
        return self.store.origin_of(name)

    def _is_moving(self, direction: str, transfer_id: bytes) -> bool:
        if direction == RECEIVED:
            return self.inbound.known.is_open(transfer_id)
        return any(link.has(transfer_id) for link in self.links.values())

    def _tell_of_tiers(self) -> None:
        holds = self._state.tiers(), self.store.order.num_leased
        if self.feed.num_subscribers and holds != self._told:
            self._told = holds
            self._state_changed()


async def _open_port(start: Callable[[], Awaitable[None]], address: tuple[str, int]) -> None:
    try:
        await start()
    except OSError as error:
        host, port = address
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
