"""The link room of a pool node: tickets, transfers, and the connections with other pools.

Peers, and the pools that may push, can change while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping

from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.facts import FactStream
from prfaas.core.transfer.facts import RECEIVED, SENT, LinksChanged, TransferDone
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.codec.loading import KERNELS, Kernels
from prfaas.pool.engine.engine_server import EngineSession
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.link_end import Destination, LinkEnd
from prfaas.pool.net.link_probe import ProbeSink
from prfaas.pool.node.own_site import OwnSite
from prfaas.pool.node.store_room import StoreRoom
from prfaas.pool.receive.data_port import DataPort
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.inbound_transfers import InboundTransfers
from prfaas.pool.receive.link_server import GatewayOrders, LinkPort
from prfaas.pool.send.block_sender import Sending
from prfaas.pool.send.link_coding import LinkCoding
from prfaas.pool.send.outbound_link import OutboundLink, SiteShare
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.wire.allow_list import AllowList
from prfaas.wire.tickets import TicketOpener

log = logging.getLogger(__name__)


class Peers:
    """Adds and removes peers.

    Args:
        site: Names the peers of the start.
        dial: Makes a link: name, host and port, budget in bits per second, data connections; 0
            is what the settings have.
        metrics: Have series for each peer.
        facts: Told when a link has come or gone.
    """

    def __init__(
        self,
        site: OwnSite,
        inbound: InboundTransfers,
        port: LinkPort,
        dial: Callable[[str, tuple[str, int], int, int], OutboundLink],
        metrics: PoolMetrics,
        facts: FactStream,
    ) -> None:
        self.settings, self.metrics, self._facts = site.settings, metrics, facts
        self._sources, self._hosts = site.sources, site.hosts
        self._inbound, self._port, self._dial = inbound, port, dial
        self.links = {peer: dial(peer, *how, 0) for peer, how in site.peers.items()}
        """Links by the name of the peer."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self.can_grow = False
        """True if peers may join."""

    def run(self, group: asyncio.TaskGroup) -> None:
        """Keep the links up, those of later peers too, until the tasks of a group are cancelled."""
        self._group = group
        for name in self.links:
            self._start(group, name)

    def add(
        self, name: str, address: tuple[str, int], budget: int = 0, connections: int = 0
    ) -> None:
        """Dial a new peer.

        Args:
            budget: Limit of the rate, bits per second; 0 is the limit in the settings, or none.
            connections: Data connections; 0 is the number in the settings, or adapts.
        """
        self.links[name] = self._dial(name, address, budget, connections)
        if self._group is not None:
            self._start(self._group, name)
        self._facts.report(LinksChanged())

    def remove(self, name: str) -> None:
        """Close the link to a peer, and forget it."""
        if self.links.pop(name, None) is None:
            return
        if (task := self._tasks.pop(name, None)) is not None:
            # The last samples of a link are taken while it closes.
            task.add_done_callback(lambda _: self._forget(name))
            task.cancel()
        self._facts.report(LinksChanged())

    def admit(self, sources: Iterable[str], hosts: Iterable[str]) -> None:
        """Change the pools that may push.

        Args:
            hosts: Names of pools of other hosts of the site.
        """
        self._sources.replace(sources)
        self._hosts.replace(hosts)

    def dismiss(self, name: str) -> None:
        """Close the connections of a pool that may not push any more."""
        self._port.dismiss(name)
        self._forget(name)

    def expire(self) -> None:
        """End transfers whose time is over. No variable that lives on keeps a removed link."""
        for link in self.links.values():
            link.expire()

    @property
    def may_exist(self) -> bool:
        """Return True if there are peers, or may be later."""
        return bool(self.links) or self.has_sources or self.can_grow

    @property
    def has_sources(self) -> bool:
        """Return True if anybody may push to this pool."""
        return bool(self._sources)

    def is_up(self, name: str) -> bool:
        """Return True if the link to a peer is up, or from one that only pushes."""
        link = self.links.get(name)
        return self._inbound.channels.is_connected(name) if link is None else link.is_up

    def is_idle(self, name: str, *, inbound: bool) -> bool:
        """Return True if no transfer to a peer is open.

        Args:
            inbound: Transfers from it count as well.
        """
        link = self.links.get(name)
        if link is not None and link.num_open:
            return False
        return not inbound or not self._inbound.known.open_from(name)

    def _start(self, group: asyncio.TaskGroup, name: str) -> None:
        self._tasks[name] = group.create_task(self.links[name].run())

    def _forget(self, name: str) -> None:
        """Remove its metrics, unless it is back, or pushes to this pool."""
        if name not in self.links and name not in self._sources:
            self.metrics.registry.forget("peer", name)


class LinkRoom:
    """Links of one pool node; ConfigError if a file of the identity cannot be used.

    Args:
        facts: Told of transfers that have ended, and of links that change.
        engines: Connected engines, by name.
        orders: Executes what gateways order.
        kernels: Kernels of link codecs.
    """

    _is_opener_due = False
    """True while the authorities of changed contracts are not in force for tickets."""

    def __init__(
        self,
        site: OwnSite,
        facts: FactStream,
        metrics: PoolMetrics,
        store: StoreRoom,
        engines: Mapping[str, EngineSession],
        orders: GatewayOrders,
        kernels: Kernels = KERNELS,
    ) -> None:
        self._settings = settings = site.settings
        self._site, self._facts, self._metrics, self._kernels = site, facts, metrics, kernels
        identity = settings.identity
        self._dialling, self._accepting = identity.dialling(), identity.accepting()
        site.trust(self._dialling, self._accepting)
        self._opener = TicketOpener(identity.authority, site.gateways, site.certificates)
        settings.check_certificate()
        self.tickets = TicketChecks(settings.name, self._opener, metrics, facts, settings.regions)
        self.io = IoThread(settings.link_lanes)
        self._end = LinkEnd(
            settings.name,
            site.feed.epoch,
            self.io,
            metrics,
            settings.link_encryption,
            settings.link_grace_ns,
            settings.send,
        )
        self.inbound = InboundTransfers(
            self._end,
            store.memory,
            facts,
            self.tickets,
            engines,
            settings.receive,
            site.hosts,
            settings.wall_s,
        )
        self.sending = Sending(store.memory, self.tickets, settings.read_limit_s)
        self.layouts = KnownLayouts(self._load_codecs)
        """Those that engines have announced."""
        self._decoding = Decoding(settings.link_codec, self.layouts, metrics, kernels)
        accepting, sources = self._accepting, site.sources
        self.port = LinkPort(
            settings.listen,
            accepting,
            DataPort(self._end, accepting.data, sources, self.inbound, self._decoding),
            ProbeSink(accepting.probe, sources, self.io, metrics.link_refused, settings.probes),
            site.gateways,
            orders,
            settings.channels,
        )
        self.peers = Peers(site, self.inbound, self.port, self._dial, metrics, facts)
        self.links = self.peers.links
        self.share = SiteShare(settings.site_budget, settings.site, self.links)
        facts.subscribe(LinksChanged, lambda _: self.share.apply())
        facts.subscribe(TransferDone, self._transfer_done)

    async def close(self) -> None:
        """Close all connections."""
        await self.port.close()
        await self.io.close()

    @property
    def num_open(self) -> int:
        """Transfers under way, in and out."""
        return self.inbound.known.num_open + sum(link.num_open for link in self.links.values())

    def is_moving(self, direction: str, transfer_id: bytes) -> bool:
        """Return True if blocks of a transfer may still move."""
        if direction == RECEIVED:
            return self.inbound.known.is_open(transfer_id)
        return any(link.has(transfer_id) for link in self.links.values())

    def abort(self, transfer_id: bytes, reason: str) -> None:
        """A gateway gives a transfer up."""
        if self.peers.has_sources:
            self.inbound.aborted(transfer_id, reason)
        for link in self.links.values():
            link.abort(transfer_id, TransferEnd.ABORTED, reason)

    def watch(self, metrics: PoolMetrics) -> None:
        """Have gauges read at each scrape."""
        inbound, links, data = self.inbound, self.links, self.port.data
        metrics.promised_bytes.set_function(lambda: inbound.known.promised_bytes)
        metrics.unfinished_bytes.set_function(lambda: data.unfinished_bytes)
        received, sent = (metrics.open_transfers.labels(direction=d) for d in (RECEIVED, SENT))
        received.set_function(lambda: inbound.known.num_open)
        sent.set_function(lambda: sum(link.num_open for link in links.values()))

    def validate(self) -> None:
        """See that no transfer is counted twice or lost; AssertionError if one is."""
        self.inbound.validate()
        self.port.data.validate()
        for peer, link in self.links.items():
            if link.peer != peer:
                raise AssertionError(f"the link to {link.peer} is kept as {peer}")
            link.validate()

    # --- identity and contracts ---

    def renew_identity(self) -> None:
        """Load the files of the identity and of the authority; links stay open.

        Raises:
            ConfigError: They cannot be used; nothing is changed.
        """
        self._settings.check_certificate()
        ends = self._dialling, self._accepting
        self._settings.identity.refresh(*(tls.messages for tls in ends))
        self._site.trust(*ends, self.io.call)
        self._opener.renew()
        self.io.call(self._renew_data)

    def _renew_data(self) -> None:
        """The same for the connections of the I/O thread, on that thread."""
        ends = (self._dialling, self._accepting)
        contexts = [context for tls in ends for context in (tls.data, tls.probe)]
        try:
            self._settings.identity.refresh(*contexts)
        except ConfigError as error:
            # The files were changed again meanwhile; the next SIGHUP loads them.
            log_event(log, logging.ERROR, "identity_kept", why=str(error))

    def follow_site(self) -> bool:
        """Put changed contracts in force; return True if there are any.

        Links and connections of sites without one end.
        """
        if (changed := self._site.look()) is not None:
            self._site.trust(self._dialling, self._accepting, self.io.call)
            for peer in changed.gone:
                if peer in self.links:
                    self.links[peer].end()
                    self.peers.remove(peer)
                self.port.dismiss(peer)
            for peer, budget in changed.budgets.items():
                if peer in self.links:
                    self.links[peer].control.set_budget(self._budget(peer, budget))
            for peer, (address, budget) in changed.came.items():
                self.peers.add(peer, address, budget)
        if changed is not None or self._is_opener_due:
            self._renew_opener()
        return changed is not None

    def _renew_opener(self) -> None:
        """Check tickets with the authorities in force; a file that cannot be read is tried again.

        Until then, `OwnSite.prove` refuses the tickets of sites without a contract.
        """
        try:
            self._opener.renew()
        except ConfigError as error:
            if not self._is_opener_due:
                log_event(log, logging.ERROR, "identity_kept", why=str(error))
            self._is_opener_due = True
        else:
            self._is_opener_due = False

    # --- links ---

    def _dial(
        self, peer: str, address: tuple[str, int], budget: int = 0, connections: int = 0
    ) -> OutboundLink:
        settings = self._settings
        to = Destination(
            peer,
            address,
            self._budget(peer, budget),
            connections or settings.link_connections.get(peer, 0),
            AllowList({peer}, self._site.prove),
        )
        coding = LinkCoding(
            settings.link_codec, self.layouts, peer, self._metrics, wall_s=settings.wall_s
        )
        ends = self._end, to, self._dialling
        return OutboundLink(*ends, coding, self.tickets, self.sending, self._facts)

    def _budget(self, peer: str, agreed: int) -> int:
        """Budget of a link, bits per second: that of a contract, or else the operator's."""
        return agreed or self._settings.link_budgets.get(peer, 0)

    def _transfer_done(self, fact: TransferDone) -> None:
        if fact.direction == SENT:
            self.sending.ended(fact.transfer.transfer_id)

    def _load_codecs(self) -> None:
        """Load the kernels: an engine has blocks that a link of this node can code."""
        if self._settings.link_codec is not LinkCodec.RAW and self.peers.may_exist:
            loop = asyncio.get_running_loop()

            def ready() -> None:
                self._metrics.set_codec(self._kernels.speed)
                with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                    loop.call_soon_threadsafe(self._decoding.kernels_ready)

            self._kernels.load(ready)
