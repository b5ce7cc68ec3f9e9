"""Link tests: the capacity of a path between two pools, over connections like those of a link.

The sending end pours bytes into a number of connections and asks the kernel how many arrived. The
receiving end, at a pool node's own port, drops them; it takes them from pools that may push, and
never for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Set
from dataclasses import dataclass

from prometheus_client import Counter

from prfaas.config.addresses import join_address
from prfaas.core.transfer.tcp_goodput import Probe
from prfaas.errors import ConfigError, PeerError, TransferError, words_of
from prfaas.pool.net.io_thread import IoThread
from prfaas.pool.net.listener import Listener
from prfaas.pool.net.tls_sockets import connect, readable, shake_hands, writable
from prfaas.tasks import cancel_all
from prfaas.wire.channel import Channel
from prfaas.wire.identity import LinkContexts, peer_name
from prfaas.wire.sockets import (
    NOTSENT_LOWAT_BYTES,
    TcpInfo,
    fit,
    keep_alive,
    share_of,
    tcp_info,
)

log = logging.getLogger(__name__)

WARM_UP_S = 1.0
"""Slow start, and BBR's first probing of the path."""
CONNECT_TIMEOUT_S = 10.0
TURN_BYTES = 512 << 10
"""Bytes that a connection moves before the others are served."""
_PAYLOAD = bytes(128 << 10)


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Limits of link tests at their receiving end."""

    connections_max: int = 32
    """Connections that bytes are dropped from at a time: a test, and the end of the last one. The
    same number may wait for their identification."""
    seconds_max: float = 30.0
    """Duration of one connection, seconds."""
    bytes_max: int = 16 << 30


LIMITS = ProbeLimits()


class ProbeSink:
    """Drops the bytes of link tests.

    Args:
        sources: Pools that may test.
        io: Where the connections live.
        refused: Counts callers that are not such a pool.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        sources: Set[str],
        io: IoThread,
        refused: Counter,
        limits: ProbeLimits = LIMITS,
    ) -> None:
        self._limits = limits
        self._tls = tls
        self._sources = sources
        self._io = io
        self._refused = refused
        self._callers: dict[asyncio.Task[None], None] = {}
        """Connections without identification, the oldest first."""
        self._tests: set[asyncio.Task[None]] = set()

    def take(self, connection: socket.socket) -> None:
        """Take a connection over, nothing read yet."""
        if not self._io.call(self._start, connection):
            connection.close()

    def _start(self, connection: socket.socket) -> None:
        if len(self._callers) >= self._limits.connections_max:
            next(iter(self._callers)).cancel()  # Strangers cannot keep pools out.
            self._refused.inc()
        task = self._io.start(self._serve(connection))
        self._callers[task] = None
        task.add_done_callback(lambda _: self._ended(task, connection))

    def _ended(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        """Also when it was cancelled before it began."""
        connection.close()
        self._callers.pop(task, None)
        self._tests.discard(task)

    def _let_in(self) -> None:
        """The connection of this task is a pool's that may test."""
        task = asyncio.current_task()
        limit = self._limits.connections_max
        if len(self._tests) >= limit:
            raise PeerError(f"{limit} connections of link tests are the limit")
        if task is not None:
            self._callers.pop(task, None)
            self._tests.add(task)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            keep_alive(connection)
            with self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            ) as secured:
                await shake_hands(secured)
                peer = peer_name(secured, self._sources)
                self._let_in()
                async with asyncio.timeout(self._limits.seconds_max):
                    num_bytes = await _drop(secured, self._limits.bytes_max)
                log.info("link test of %s: %d bytes over one connection", peer, num_bytes)
        except PeerError as error:
            log.warning("a link test is refused: %s", error)
            self._refused.inc()
        except (OSError, TimeoutError) as error:
            log.info("a connection of a link test ends: %r", error)


class ProbeServer:
    """The receiving end of link tests where no pool node runs.

    Args:
        address: Host and port; port 0 takes a free one.
        sources: Pools that may test.
    """

    def __init__(self, address: tuple[str, int], tls: LinkContexts, sources: Set[str]) -> None:
        self._address = address
        self._io = IoThread()
        refused = Counter("refused", "Callers that are no pool that may test.", registry=None)
        self.take_probe = ProbeSink(tls.probe, sources, self._io, refused).take
        self._listener = Listener(address, tls, self, refused)

    def new_channel(self) -> Channel:
        """Return a protocol that refuses the connection."""
        return Channel(lambda *_: None, lambda *_: None, _refuse)

    def take_data(self, connection: socket.socket, *, is_sealed: bool) -> None:
        """Refuse a data connection, sealed or not."""
        _refuse((connection, is_sealed))

    def open(self) -> None:
        """Start to listen; ConfigError if the address cannot be had."""
        try:
            self._listener.open()
        except OSError as error:
            host, port = self._address
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listener.port

    async def close(self) -> None:
        """Stop listening, and end every test."""
        await self._listener.close()
        await self._io.close()


def _refuse(_: object) -> None:
    raise PeerError("no pool node runs here, only the receiving end of link tests")


async def _drop(secured: ssl.SSLSocket, bytes_max: int) -> int:
    """Read until the end, or until it is enough."""
    nowhere, total, turn = bytearray(TURN_BYTES), 0, 0
    while total < bytes_max:
        try:
            count = secured.recv_into(nowhere)
        except ssl.SSLWantReadError:
            await readable(secured)
            continue
        if not count:
            break
        total, turn = total + count, turn + count
        if turn > TURN_BYTES:
            turn = 0
            await asyncio.sleep(0)
    return total


async def probe(
    address: tuple[str, int],
    tls: ssl.SSLContext,
    peer: str,
    *,
    num_connections: int,
    seconds: float,
    budget_bits_per_s: int = 0,
    warm_up_s: float = WARM_UP_S,
) -> tuple[Probe, str]:
    """Measure the throughput of a number of connections.

    Args:
        address: Of the receiving end.
        tls: Our identity, for link tests.
        peer: Name in the receiving end's certificate.
        seconds: Duration of the measurement, after the warm-up.
        budget_bits_per_s: Of all together; 0 is no limit.
        warm_up_s: Duration of sending before the measurement, seconds.

    Returns:
        The measurement, and the congestion control that is live.

    Raises:
        TransferError: The other end is not there, or ended the test.
        PeerError: It is another peer.
    """
    try:
        async with _dialled(address, tls, peer, num_connections) as connections:
            for connection in connections:
                fit(connection, share_of(budget_bits_per_s, num_connections), NOTSENT_LOWAT_BYTES)
            control = connections[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            measured = await _measure(connections, seconds, warm_up_s)
    except PeerError as error:
        raise PeerError(
            f"no link test with {peer} at {join_address(address)}: {error}; "
            "see that the address is that pool node's"
        ) from None
    except (OSError, TimeoutError) as error:
        # A TLS stream that ends is an OSError with the place in OpenSSL's source for a reason.
        reason = words_of(error)
        if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError)):
            reason = "it closed the connection"
        elif isinstance(error, ssl.SSLCertVerificationError):
            reason = f"its certificate is not of our ca.pem ({error.verify_message})"
        raise TransferError(
            f"no link test with {peer} at {join_address(address)}: {reason}; "
            "check that it runs there, lists this pool as a source, and runs no other test"
        ) from None
    return measured, control.rstrip(b"\0").decode()


@contextlib.asynccontextmanager
async def _dialled(
    address: tuple[str, int], tls: ssl.SSLContext, peer: str, count: int
) -> AsyncIterator[list[ssl.SSLSocket]]:
    async with contextlib.AsyncExitStack() as stack:
        connections: list[ssl.SSLSocket] = []
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for _ in range(count):
                plain = stack.enter_context(await connect(address))
                secured = stack.enter_context(tls.wrap_socket(plain, do_handshake_on_connect=False))
                await shake_hands(secured)
                peer_name(secured, frozenset({peer}))
                connections.append(secured)
        yield connections


async def _measure(connections: list[ssl.SSLSocket], seconds: float, warm_up_s: float) -> Probe:
    pouring = [asyncio.create_task(_pour(connection)) for connection in connections]
    loop = asyncio.get_running_loop()
    try:
        await _wait(pouring, warm_up_s)
        before, began = [tcp_info(connection) for connection in connections], loop.time()
        await _wait(pouring, seconds)
        after, took = [tcp_info(connection) for connection in connections], loop.time() - began
    finally:
        await cancel_all(pouring)
    return Probe(
        num_connections=len(connections),
        goodput_bits_per_s=round(_grown(before, after, "acked_bytes") * 8 / took),
        rtt_ns=min(info.min_rtt_ns for info in after),
        loaded_rtt_ns=sum(info.rtt_ns for info in after) // len(after),
        segments=_grown(before, after, "segments"),
        retransmits=_grown(before, after, "retransmits"),
    )


async def _wait(pouring: list[asyncio.Task[None]], seconds: float) -> None:
    """Send on all connections for a while; the first failure ends it."""
    done, _ = await asyncio.wait(pouring, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def _grown(before: list[TcpInfo], after: list[TcpInfo], counter: str) -> int:
    pairs = zip(before, after, strict=True)
    return sum(getattr(now, counter) - getattr(then, counter) for then, now in pairs)


async def _pour(secured: ssl.SSLSocket) -> None:
    turn = 0
    while True:
        try:
            turn += secured.send(_PAYLOAD)
        except ssl.SSLWantWriteError:
            await writable(secured)
        if turn > TURN_BYTES:
            turn = 0
            await asyncio.sleep(0)
