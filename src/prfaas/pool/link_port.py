"""The TLS port at which other pools push blocks and gateways subscribe to events."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine

from prfaas.errors import PeerError
from prfaas.pool.inbound import InboundTransfers
from prfaas.pool.metrics import PoolMetrics
from prfaas.wire.channel import Channel
from prfaas.wire.frames import ControlFrame, Frame
from prfaas.wire.identity import peer_name
from prfaas.wire.liveness import keep_alive
from prfaas.wire.messages import (
    Abort,
    AnyMessage,
    Commit,
    Offer,
    Ping,
    PoolHello,
    Subscribe,
    decode,
)

log = logging.getLogger(__name__)

BACKLOG = 100
HANDSHAKE_TIMEOUT_S = 5.0
ACCEPT_RETRY_S = 0.1
"""Out of file descriptors, say: some are given back soon."""


class LinkPort:
    """Accepts peers whose certificate our authority signed and whose name is on a list.

    Args:
        address: Host and port; port 0 takes a free one.
        sources: Pools that may push.
        gateways: Gateways that may subscribe and abort.
    """

    def __init__(
        self,
        address: tuple[str, int],
        tls: ssl.SSLContext,
        *,
        sources: frozenset[str],
        gateways: frozenset[str],
        inbound: InboundTransfers,
        metrics: PoolMetrics,
        on_subscribe: Callable[[Channel], None],
        on_unsubscribe: Callable[[Channel], None],
        on_abort: Callable[[bytes, str], None],
    ) -> None:
        self._address = address
        self._tls = tls
        self._sources = sources
        self._gateways = gateways
        self._inbound = inbound
        self._metrics = metrics
        self._on_subscribe = on_subscribe
        self._on_unsubscribe = on_unsubscribe
        self._on_abort = on_abort
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """The accept loop, and handshakes under way."""
        self._channels: dict[Channel, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Start to listen.

        Raises:
            OSError: The address can not be had.
        """
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._listener = socket.create_server(self._address, family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._start(self._accept(self._listener))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        if self._listener is None:
            raise RuntimeError("the port is not open")
        port: int = self._listener.getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for channel in list(self._channels):
            channel.close("this pool node stops")

    def is_connected(self, source: str) -> bool:
        """Whether a link from the pool `source` stands."""
        return any(channel.peer == source and channel.is_open for channel in self._channels)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._start(self._shake_hands(connection))

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Channel(self._deliver, self._closed, self._greet),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
        except ConnectionResetError:
            log.debug("a caller left before it said who it is")
        except OSError as error:
            self._metrics.refused.labels(port="link").inc()
            log.warning("connection refused: %s", error)

    def _greet(self, channel: Channel) -> None:
        channel.peer = peer_name(channel.ssl_object, self._sources | self._gateways)
        self._channels[channel] = asyncio.get_running_loop().create_task(keep_alive(channel))

    def _deliver(self, channel: Channel, frame: Frame) -> None:
        if isinstance(frame, ControlFrame):
            self._handle(channel, decode(frame.payload))
            return
        self._require(channel, self._sources)
        if not self._inbound.block(frame, channel.peer):
            channel.send(Abort(transfer_id=frame.transfer_id, reason="not wanted"))

    def _handle(self, channel: Channel, message: AnyMessage) -> None:
        match message:
            case Ping():
                return
            case PoolHello():
                self._welcome(channel, message)
            case Offer():
                self._require(channel, self._sources)
                self._inbound.offered(message.transfer_id, channel.peer)
            case Commit():
                self._require(channel, self._sources)
                self._inbound.committed(message, channel.peer)
            case Subscribe():
                self._require(channel, self._gateways)
                self._on_subscribe(channel)
            case Abort() if channel.peer in self._gateways:
                self._on_abort(message.transfer_id, message.reason)
            case Abort():
                self._inbound.aborted_by(message.transfer_id, channel.peer, message.reason)
            case _:
                raise PeerError(f"{type(message).__name__} has no meaning on this port")

    def _welcome(self, channel: Channel, hello: PoolHello) -> None:
        """A pool has one connection: whatever stood before a new one is dead."""
        self._require(channel, self._sources)
        if hello.pool != channel.peer:
            raise PeerError(f"a pool calls itself {hello.pool}, its certificate {channel.peer}")
        older = [other for other in self._channels if other.peer == channel.peer]
        older.remove(channel)
        for other in older:
            other.close("the pool has connected anew")
        if older:
            self._inbound.peer_lost(channel.peer)

    def _require(self, channel: Channel, role: frozenset[str]) -> None:
        if channel.peer not in role:
            raise PeerError(f"{channel.peer} may not do this; its role is another")

    def _closed(self, channel: Channel, reason: str) -> None:
        if channel.broke_protocol:
            self._metrics.refused.labels(port="link").inc()
        task = self._channels.pop(channel, None)
        if task is None:
            log.warning("connection refused: %s", reason)
            return
        task.cancel()
        log.warning("connection of %s closed: %s", channel.peer, reason)
        self._on_unsubscribe(channel)
        if channel.peer in self._sources and not self.is_connected(channel.peer):
            self._inbound.peer_lost(channel.peer)
