"""The TLS port at which other pools push blocks and gateways subscribe to events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from typing import Protocol

from prfaas.core.transfer.events import (
    AbortCame,
    CommitCame,
    DataDropped,
    LinkBroke,
    LinkCame,
    Offered,
    PeerLost,
)
from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption, agreed
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.errors import PeerError
from prfaas.log_throttle import LogThrottle
from prfaas.pool.net.io_thread import BusyMeter
from prfaas.pool.net.link_probe import ProbeSink
from prfaas.pool.net.listener import Listener
from prfaas.pool.receive.data_port import DataPort
from prfaas.wire.allow_list import peer_regions
from prfaas.wire.channel import LIMITS as CHANNEL_LIMITS
from prfaas.wire.channel import Channel, ChannelLimits, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import LinkContexts, peer_name
from prfaas.wire.messages.base import Goodbye, Ping, Pong, Unsupported
from prfaas.wire.messages.codec import AnyMessage, OfGateway, decode, tag_of
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import (
    Abort,
    Commit,
    Connections,
    Decodes,
    Offer,
    PoolHello,
    Refused,
    Resumed,
)
from prfaas.wire.sealed.keys import LinkSecret, new_secret

log = logging.getLogger(__name__)


class GatewayOrders(Protocol):
    """Executes the messages of gateways."""

    def ordered(self, channel: Channel, message: OfGateway) -> None:
        """Execute a message of the gateway at the other end of a connection."""

    def gateway_left(self, channel: Channel) -> None:
        """A connection is closed, of a gateway or a pool."""

    def shows_load(self, peer: str) -> bool:
        """Return True if a peer may know how busy this node is."""


class LinkPort:
    """Accepts peers with a certificate of our authority and a listed name.

    Args:
        address: Host and port; port 0 takes a free one.
        data: Server of data connections; names the pools that may push, and test the link.
        probes: Takes link tests.
        gateways: Gateways that may subscribe and abort.
        orders: Executes what gateways order.
        channels: Limits on unsent bytes of connections for messages.
    """

    def __init__(
        self,
        address: tuple[str, int],
        tls: LinkContexts,
        data: DataPort,
        probes: ProbeSink,
        gateways: Set[str],
        orders: GatewayOrders,
        channels: ChannelLimits = CHANNEL_LIMITS,
    ) -> None:
        self.data, self._end, self._orders = data, data.end, orders
        self._inbound, self._decoding = data.inbound, data.decoding
        self._busy = BusyMeter(data.end.io)
        self._sources, self._gateways = data.sources, gateways
        self._channels, self._from_gateways = data.inbound.channels, set[Channel]()
        self._limits = channels
        self.take_data, self.take_probe = data.take, probes.take
        self._listener = Listener(address, tls, self, data.end.metrics.link_refused)
        self._said = LogThrottle()
        self._shares: dict[Channel, int] = {}
        """Data connections that each link was told it may have."""

    def new_channel(self) -> Channel:
        """Return the protocol of a connection that carries messages."""
        return Channel(self._deliver, self._closed, self._greet, self._limits)

    async def open(self) -> None:
        """Start to listen; OSError if the address cannot be had."""
        self.data.open()
        self._listener.open()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listener.port

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        await self._listener.close()
        self._inbound.report(DataDropped(is_final=True))
        for channel in list(self._channels.tasks):
            channel.close("this pool node stops")
        self.data.close()

    def dismiss(self, peer: str) -> None:
        """End the connections of a peer that may not push any more. It still reads what it was
        sent, such as the end of a transfer."""
        for channel in [each for each in self._channels.tasks if each.peer == peer]:
            channel.end("it is no member any more")
        self._drop_link(peer)

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
        if refusal and channel not in self._channels.from_sources | self._from_gateways:
            raise refusal
        regions = peer_regions(channel.ssl_object)
        if channel in self._channels.from_sources:
            self._inbound.met(channel.peer, regions)
        self._channels.tasks[channel] = asyncio.get_running_loop().create_task(keep_alive(channel))

    def _deliver(self, channel: Channel, frame: Frame) -> None:
        self._handle(channel, decode(frame.payload))

    def _handle(self, channel: Channel, message: AnyMessage) -> None:
        match message:
            case Ping():
                if message.at_ns:
                    received = self.data.received(channel.peer)
                    is_shown = channel in self._channels.from_sources and self._orders.shows_load(
                        channel.peer
                    )
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
                self._require(channel, self._channels.from_sources)
                self._inbound.report(Offered(channel.peer, message.transfer_id, message))
            case Commit():
                self._require(channel, self._channels.from_sources)
                transfer_id, missing = message.transfer_id, tuple(keys_of(message.missing))
                count = message.num_blocks
                self._inbound.report(
                    CommitCame(channel.peer, transfer_id, num_blocks=count, missing=missing)
                )
            case Refused():
                self._require(channel, self._channels.from_sources)
                kind, why = TransferEnd.REFUSED, message.reason
                self._inbound.report(
                    AbortCame(channel.peer, message.transfer_id, kind=kind, reason=why)
                )
            case Abort() if channel in self._channels.from_sources:
                kind, why = message.kind, message.reason
                self._inbound.report(
                    AbortCame(channel.peer, message.transfer_id, kind=kind, reason=why)
                )
            case _ if isinstance(message, OfGateway):
                self._require(channel, self._from_gateways)
                self._orders.ordered(channel, message)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on this port")

    def _welcome(self, channel: Channel, hello: PoolHello) -> None:
        """A pool has one link: a new one replaces the previous ones.

        A hello that is read late, after a stall, is of a connection that the pool has left.
        """
        self._require(channel, self._channels.from_sources)
        if hello.pool != channel.peer:
            raise PeerError(f"a pool calls itself {hello.pool}, its certificate {channel.peer}")
        *older, newest = [other for other in self._channels.tasks if other.peer == channel.peer]
        if newest is not channel:
            channel.close("the pool has a newer connection")
            return
        for other in older:
            other.close("the pool has reconnected")
        self._drop_link(channel.peer)
        secret = self._secret(channel.peer, hello)
        self.data.begin_link(channel.peer, hello.link, secret)
        self._inbound.report(LinkCame(channel.peer, resumes=tuple(hello.resumes)))
        channel.send(
            Resumed(
                epoch=self._end.epoch,
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
        encryption = agreed(self._end.encryption, hello.encryptions)
        self._end.metrics.set_encryption(peer, "received", encryption)
        if encryption is LinkEncryption.TLS:
            return None
        return LinkSecret(encryption, peer, self._end.pool, hello.link, new_secret())

    def _warn(self, text: str) -> None:
        if self._said.is_new(text):
            log.warning("%s", text)

    def _drop_link(self, peer: str) -> None:
        self._inbound.report(DataDropped(peer))
        self._decoding.end_link(peer)
        self.data.end_link(peer)

    def _roles(self) -> tuple[tuple[Set[str], set[Channel]], ...]:
        return (self._sources, self._channels.from_sources), (self._gateways, self._from_gateways)

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
            self._end.metrics.link_refused.inc()
        task = self._channels.tasks.pop(channel, None)
        if task is None:
            self._warn(f"connection refused: {reason}")
            return
        task.cancel()
        self._shares.pop(channel, None)
        self._warn(f"connection of {channel.peer} closed: {reason}")
        self._orders.gateway_left(channel)
        is_source = channel in self._channels.from_sources
        self._channels.from_sources.discard(channel)
        self._from_gateways.discard(channel)
        if not is_source or self._channels.is_connected(channel.peer):
            return
        self._drop_link(channel.peer)
        self._tell_shares()
        lost = PeerLost if channel.broke_protocol else LinkBroke
        self._inbound.report(lost(channel.peer))
