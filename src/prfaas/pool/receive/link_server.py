"""The TLS port at which other pools push blocks and gateways subscribe to events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption, agreed
from prfaas.core.transfer.residency import Regions
from prfaas.core.transfer.transfer_state import TransferEnd, TransferState
from prfaas.errors import PeerError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.net.busy import BusyMeter
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.link_probe import LIMITS as PROBE_LIMITS
from prfaas.pool.net.link_probe import ProbeLimits, ProbeSink
from prfaas.pool.net.listener import Listener
from prfaas.pool.receive.data_receiver import DigestError
from prfaas.pool.receive.data_server import DataPort
from prfaas.pool.receive.decoding import Decoding
from prfaas.pool.receive.early_blocks import EarlyBlocks
from prfaas.pool.receive.inbound_transfers import InboundTransfers, abort_of
from prfaas.wire.channel import LIMITS as CHANNEL_LIMITS
from prfaas.wire.channel import Channel, ChannelLimits
from prfaas.wire.fragments import ReceivedBlock
from prfaas.wire.frames import Frame
from prfaas.wire.identity import LinkContexts, peer_name
from prfaas.wire.liveness import keep_alive
from prfaas.wire.messages.base import Goodbye, Message, Ping, Pong, Unsupported
from prfaas.wire.messages.codec import AnyMessage, OfGateway, decode, tag_of
from prfaas.wire.messages.comparing import Compare
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import (
    LinkLease,
    PinPrefix,
    Purge,
    PurgeEnd,
    PurgePrefix,
    Subscribe,
)
from prfaas.wire.messages.link import (
    Abort,
    Arrived,
    Commit,
    Committed,
    Connections,
    Decodes,
    Offer,
    PoolHello,
    Pull,
    Refused,
    Release,
    Resumed,
)
from prfaas.wire.messages.survey import Survey
from prfaas.wire.regions import peer_regions
from prfaas.wire.sealed.keys import LinkSecret, new_secret
from prfaas.wire.sealed.records import SealError

log = logging.getLogger(__name__)

KEYS_AT_ONCE = 4096

_AnyPurge = Purge | PurgeEnd | PurgePrefix


class LinkPort:
    """Accepts peers with a certificate of our authority and a listed name.

    Args:
        address: Host and port; port 0 takes a free one.
        epoch: Our event epoch: tells a peer that comes back whether we are still the same.
        sources: Pools that may push, and test the link.
        gateways: Gateways that may subscribe and abort.
        decoding: Agrees on codecs with those pools.
        encryption: The operator's choice for their data connections.
        channels: Limits on unsent bytes of connections for messages.
        probes: Limits of link tests.
        on_met: Called with a source and the regions in its certificate; True if they have changed.
        on_pin: Called with what a gateway pins, its name, and how to answer.
        allows: Returns False for a message that a gateway may not send, once it is answered.
        on_resumed: Called with each open transfer of a source that has reconnected, and the new
            connection.
    """

    def __init__(
        self,
        address: tuple[str, int],
        tls: LinkContexts,
        *,
        pool: str,
        epoch: str,
        sources: Set[str],
        gateways: Set[str],
        inbound: InboundTransfers,
        metrics: PoolMetrics,
        io: IoThread,
        on_subscribe: Callable[[Channel, Subscribe | Survey], None],
        on_unsubscribe: Callable[[Channel], None],
        on_abort: Callable[[bytes, str], None],
        on_pull: Callable[[Pull, Callable[[Message], None]], None],
        on_refused: Callable[[Refused, str], None],
        on_purge: Callable[[_AnyPurge, str, Callable[[Message], None]], None],
        on_pin: Callable[[PinPrefix, str, Callable[[Message], None]], None],
        clock_ns: Callable[[], int],
        decoding: Decoding,
        encryption: LinkEncryption = LinkEncryption.TLS,
        channels: ChannelLimits = CHANNEL_LIMITS,
        probes: ProbeLimits = PROBE_LIMITS,
        on_met: Callable[[str, Regions], bool] = lambda *_: False,
        on_compare: Callable[[Compare, Callable[[Message], None]], None] = lambda *_: None,
        allows: Callable[[str, Message, Callable[[Message], None]], bool] = lambda *_: True,
        on_lease: Callable[[str, LinkLease], None] = lambda *_: None,
        shows_load: Callable[[str], bool] = lambda _: True,
        on_resumed: Callable[[bytes, Channel], None] = lambda *_: None,
    ) -> None:
        self._pool, self._allows, self._shows_load = pool, allows, shows_load
        self._encryption = encryption
        self._decoding = decoding
        self._busy = BusyMeter(lambda: io.thread_id)
        self._sources = sources
        self._gateways = gateways
        self._from_sources: set[Channel] = set()
        self._from_gateways: set[Channel] = set()
        self._inbound = inbound
        self._metrics = metrics
        self._on_subscribe = on_subscribe
        self._on_unsubscribe = on_unsubscribe
        self._on_abort = on_abort
        self._on_pull = on_pull
        self._on_refused = on_refused
        self._on_purge, self._on_compare, self._on_met = on_purge, on_compare, on_met
        self._on_lease, self._on_resumed, self._on_pin = on_lease, on_resumed, on_pin
        self._epoch = epoch
        self.data = DataPort(
            tls.data,
            sources,
            inbound,
            io,
            decoding,
            is_spread=encryption is LinkEncryption.SEALED,
            on_block=self._take_block,
            on_unwanted=self._refuse_transfer,
            on_no_room=self._no_room,
            on_broken=self._broken,
            on_refused=self._refuse,
        )
        """Server of their data connections."""
        self._listener = Listener(
            address,
            tls,
            lambda: Channel(self._deliver, self._closed, self._greet, channels),
            self.data.take,
            self.data.take_sealed,
            ProbeSink(tls.probe, sources, io, self._refuse, probes).take,
            self._refuse,
        )
        self._early = EarlyBlocks(clock_ns, inbound.peer_bytes_max)
        self._said = LogThrottle(clock_ns)
        self._is_closed = False
        self._channels: dict[Channel, asyncio.Task[None]] = {}
        self._shares: dict[Channel, int] = {}
        """Data connections that each link was told it may have."""

    async def open(self) -> None:
        """Start to listen.

        Raises:
            OSError: The address cannot be had.
        """
        self.data.open()
        self._listener.open()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listener.port

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        self._is_closed = True
        await self._listener.close()
        for peer, transfer_id in self._early.all():
            self._drop_early(peer, transfer_id)
        for channel in list(self._channels):
            channel.close("this pool node stops")
        self.data.close()

    def dismiss(self, peer: str) -> None:
        """End the connections of a peer that may not push any more. It still reads what it was
        sent, such as the end of a transfer."""
        for channel in [each for each in self._channels if each.peer == peer]:
            channel.end("it is no member any more")
        self._drop_link(peer)

    def is_connected(self, source: str) -> bool:
        """Return True if a link from the pool `source` stands."""
        return any(channel.peer == source and channel.is_open for channel in self._from_sources)

    def _greet(self, channel: Channel) -> None:
        # No peer is set before a role is proved: a forged name is answered like an unknown one.
        name = peer_name(channel.ssl_object, self._sources | self._gateways)
        refusal: PeerError | None = None
        for admits, channels in self._roles():
            try:
                peer_name(channel.ssl_object, admits)
                channels.add(channel)
                channel.peer = name
            except PeerError as error:
                refusal = error
        if refusal and channel not in self._from_sources | self._from_gateways:
            raise refusal
        regions = peer_regions(channel.ssl_object)
        if channel in self._from_sources and self._on_met(channel.peer, regions):
            self._inbound.peer_lost(channel.peer)
        self._channels[channel] = asyncio.get_running_loop().create_task(keep_alive(channel))

    def _deliver(self, channel: Channel, frame: Frame) -> None:
        self._handle(channel, decode(frame.payload))

    def _keep(self, peer: str, block: ReceivedBlock) -> None:
        """Store a block and acknowledge it."""
        is_wanted = self._inbound.block(block, peer)
        channel = self.channel_of(peer)
        if channel is None:
            return
        transfer_id, layout_id = block.transfer_id, block.layout_id
        if not is_wanted:
            channel.send(self._inbound.not_wanted(transfer_id, peer))
            return
        keys = wire_keys([block.key])
        channel.send(Arrived(transfer_id=transfer_id, layout_id=layout_id, keys=keys))
        self._settle(channel, transfer_id)

    def _settle(self, channel: Channel, transfer_id: bytes) -> None:
        if self._inbound.settle(transfer_id) is TransferState.COMMITTED:
            channel.send(Committed(transfer_id=transfer_id))

    def _handle(self, channel: Channel, message: AnyMessage) -> None:
        match message:
            case Ping():
                if message.at_ns:
                    received = self.data.received(channel.peer)
                    is_shown = channel in self._from_sources and self._shows_load(channel.peer)
                    busy = self._busy.share() if is_shown else 0.0
                    channel.send(Pong(at_ns=message.at_ns, received=received, busy=busy))
                self.data.drop_older(channel.peer, message.connections)
            case Unsupported():
                return  # An older peer goes without what was sent.
            case Goodbye():
                return  # The end of the connection follows, and is logged with the reason.
            case PoolHello():
                self._welcome(channel, message)
            case Offer():
                self._require(channel, self._from_sources)
                self._offered(channel, message)
            case Commit():
                self._require(channel, self._from_sources)
                self._inbound.committed(message, channel.peer)
                self._settle(channel, message.transfer_id)
            case Refused():
                self._require(channel, self._from_sources)
                self._on_refused(message, channel.peer)
            case Abort() if channel in self._from_sources:
                self._inbound.aborted_by(message, channel.peer)
            case _ if isinstance(message, OfGateway):
                self._require(channel, self._from_gateways)
                self._of_gateway(channel, message)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on this port")

    def _of_gateway(self, channel: Channel, message: OfGateway) -> None:
        if not self._allows(channel.peer, message, channel.send):
            return
        match message:
            case Subscribe() | Survey():
                self._on_subscribe(channel, message)
            case Pull():
                self._on_pull(message, channel.send)
            case Abort():
                self._on_abort(message.transfer_id, message.reason)
            case Release():
                self._inbound.release(message.transfer_id)
            case Purge() | PurgeEnd() | PurgePrefix():
                self._on_purge(message, channel.peer, channel.send)
            case PinPrefix():
                self._on_pin(message, channel.peer, channel.send)
            case LinkLease():
                self._on_lease(channel.peer, message)
            case Compare():
                self._on_compare(message, channel.send)

    def _offered(self, channel: Channel, offer: Offer) -> None:
        channel.send(self._inbound.offered(offer, channel.peer))
        for block, done in self._early.take(channel.peer, offer.transfer_id):
            self._take_block(channel.peer, block, done)

    def _welcome(self, channel: Channel, hello: PoolHello) -> None:
        """A pool has one link: a new one replaces the previous ones.

        A hello that is read late, after a stall, is of a connection that the pool has left.
        """
        self._require(channel, self._from_sources)
        if hello.pool != channel.peer:
            raise PeerError(f"a pool calls itself {hello.pool}, its certificate {channel.peer}")
        *older, newest = [other for other in self._channels if other.peer == channel.peer]
        if newest is not channel:
            channel.close("the pool has a newer connection")
            return
        for other in older:
            other.close("the pool has reconnected")
        self._drop_link(channel.peer)
        secret = self._secret(channel.peer, hello)
        self.data.begin_link(channel.peer, hello.link, secret)
        self._inbound.resumed(channel.peer, hello.resumes)
        for transfer_id in dict.fromkeys(hello.resumes):
            self._resume(channel, transfer_id)
        channel.send(
            Resumed(
                epoch=self._epoch,
                takes_ages=True,
                encryption=WIRE_NAMES[secret.encryption] if secret is not None else "",
                secret=secret.secret if secret is not None else b"",
                connections=self.data.share,
            )
        )
        if tag_of(Connections) in hello.takes:
            self._shares[channel] = self.data.share
        self._tell_shares()
        self._decoding.begin_link(
            channel.peer,
            hello.link,
            hello.codecs,
            lambda codecs: channel.send(Decodes(codecs=codecs)),
        )

    def _tell_shares(self) -> None:
        """Report to each link how many data connections it may have, if that has changed."""
        share = self.data.share
        for channel, told in self._shares.items():
            if told != share:
                self._shares[channel] = share
                channel.send(Connections(num_max=share))

    def _secret(self, peer: str, hello: PoolHello) -> LinkSecret | None:
        """Return a fresh secret for the session of a hello; None if it uses TLS."""
        encryption = agreed(self._encryption, hello.encryptions)
        self._metrics.set_encryption(peer, "received", encryption)
        if encryption is LinkEncryption.TLS:
            return None
        return LinkSecret(encryption, peer, self._pool, hello.link, new_secret())

    def _resume(self, channel: Channel, transfer_id: bytes) -> None:
        """Report the end of a transfer to a reconnected peer."""
        transfer = self._inbound.ending(transfer_id, channel.peer)
        if transfer is None:
            return
        if not transfer.is_open and transfer.state is not TransferState.COMMITTED:
            channel.send(abort_of(transfer))
            return
        by_layout: dict[bytes, list[BlockKey]] = {}
        for layout_id, key in self._inbound.arrived(transfer_id):
            by_layout.setdefault(layout_id, []).append(key)
        for layout_id, keys in by_layout.items():
            for start in range(0, len(keys), KEYS_AT_ONCE):
                part = wire_keys(keys[start : start + KEYS_AT_ONCE])
                channel.send(Arrived(transfer_id=transfer_id, layout_id=layout_id, keys=part))
        if transfer.is_open:
            self._on_resumed(transfer_id, channel)
        self._settle(channel, transfer_id)

    # --- blocks ---

    def channel_of(self, peer: str) -> Channel | None:
        """The connection for messages of a peer; None without one."""
        return next((c for c in self._channels if c.peer == peer and c.is_open), None)

    def _take_block(self, peer: str, block: ReceivedBlock, done: Callable[[], None]) -> None:
        if self._is_closed:
            done()
            return
        if not self._inbound.is_offered(block.transfer_id, peer):
            if not self._early.add(peer, block, done):
                self._no_room(peer, block.transfer_id)
                done()
            return
        self._keep(peer, block)
        done()

    def _no_room(self, peer: str, transfer_id: bytes) -> None:
        """A block could not be received: its transfer cannot be completed any more."""
        self._drop_early(peer, transfer_id)
        self._inbound.no_room(transfer_id, peer)
        channel = self.channel_of(peer)
        if channel is not None:
            channel.send(Abort(transfer_id=transfer_id, kind=TransferEnd.NO_ROOM))

    def _refuse_transfer(self, peer: str, transfer_id: bytes) -> None:
        self._metrics.blocks_dropped.labels(reason="late").inc()
        channel = self.channel_of(peer)
        if channel is not None:
            channel.send(self._inbound.not_wanted(transfer_id, peer))

    def _broken(self, peer: str, error: PeerError) -> None:
        """A data connection broke the protocol: its peer cannot be trusted."""
        self._warn(f"data connection of {peer or 'a stranger'} closed: {error}")
        if isinstance(error, SealError):
            self._refuse()  # Of somebody on the path: the peer proved itself over TLS.
            return
        if isinstance(error, DigestError):
            self._inbound.broken_block()
        channel = self.channel_of(peer) if peer else None
        if channel is not None:
            channel.distrust(str(error))  # Counted when it is closed.
        else:
            self._refuse()

    def _warn(self, text: str) -> None:
        if self._said.is_new(text):
            log.warning("%s", text)

    def _refuse(self) -> None:
        self._metrics.refused.labels(port="link").inc()

    def expire(self) -> None:
        """Drop blocks without an offer."""
        for peer, transfer_id in self._early.overdue():
            self._drop_early(peer, transfer_id)
            self._refuse_transfer(peer, transfer_id)

    def _drop_early(self, peer: str, transfer_id: bytes) -> None:
        for _, done in self._early.take(peer, transfer_id):
            done()

    def _drop_link(self, peer: str) -> None:
        for other, transfer_id in self._early.all():
            if other == peer:
                self._drop_early(peer, transfer_id)
        self._decoding.end_link(peer)
        self.data.end_link(peer)

    def _roles(self) -> tuple[tuple[Set[str], set[Channel]], ...]:
        return (self._sources, self._from_sources), (self._gateways, self._from_gateways)

    def _require(self, channel: Channel, channels: set[Channel]) -> None:
        if channel not in channels:
            admits = next(admits for admits, others in self._roles() if others is channels)
            known = " or ".join(sorted(admits)) or "nobody"
            raise PeerError(
                f"{channel.peer} may not do this, {known} may; a pool that pushes is named with "
                "--source, a gateway with --gateway"
            )

    def _closed(self, channel: Channel, reason: str) -> None:
        if channel.broke_protocol:
            self._refuse()
        task = self._channels.pop(channel, None)
        if task is None:
            self._warn(f"connection refused: {reason}")
            return
        task.cancel()
        self._shares.pop(channel, None)
        self._warn(f"connection of {channel.peer} closed: {reason}")
        self._on_unsubscribe(channel)
        is_source = channel in self._from_sources
        self._from_sources.discard(channel)
        self._from_gateways.discard(channel)
        if not is_source or self.is_connected(channel.peer):
            return
        self._drop_link(channel.peer)
        self._tell_shares()
        if channel.broke_protocol:
            self._inbound.peer_lost(channel.peer)
        else:
            self._inbound.peer_away(channel.peer)
