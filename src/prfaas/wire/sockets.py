"""TCP sockets for wide-area links: options, and the kernel's state of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
from asyncio.trsock import TransportSocket
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

CONGESTION_CONTROL = b"bbr"
NOTSENT_LOWAT_BYTES = 128 << 10
DESCRIPTORS_WANTED = 1 << 16
"""Bytes in a socket beyond its congestion window: deep buffers would delay urgent blocks."""
USER_TIMEOUT_MS = 15_000
"""Longer than a receiver stalls for good reasons; a path that is silent that long is dead."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 5, 2, 3
REQUEST_PROBE_S, REQUEST_PROBES = 2, 10
"""Of connections with requests: seconds of silence before a probe and between two, and how many."""
HAPPY_EYEBALLS_S = 0.25
"""After so long without an answer of an address of a host, the next one is tried beside it."""
RATE_BITS_PER_S_MAX = 10**13
"""Minimum basis of a rate from the kernel: a rate of few segments is arbitrary."""
_TCP_NOTSENT_LOWAT = 25
_TCP_THIN_LINEAR_TIMEOUTS = 16
_SO_MAX_PACING_RATE = 47
_TCP_INFO_BYTES = 196
_UNPACED = 2**64 - 1
_U8_FIELDS = 8


AddrInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


async def happy_eyeballs_s(host: str, port: int) -> float | None:
    """Return the delay between two addresses of a host, seconds; None for a host of one address,
    whose connection asyncio then makes without a race, in which a cancelled caller can leave an
    open socket behind (CPython 3.11); OSError if there is no such host."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return HAPPY_EYEBALLS_S if len(found) > 1 else None


def prepare(connection: socket.socket) -> str:
    """Set the options of a data connection, before it is connected.

    Returns:
        The congestion control that is live: BBR, unless the host forbids it.
    """
    tcp = socket.IPPROTO_TCP
    _prefer_bbr(connection)
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(tcp, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    keep_alive(connection)
    return connection.getsockopt(tcp, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def _prefer_bbr(connection: socket.socket) -> None:
    """Set BBR, unless the host forbids it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)


def prepare_messages(connection: socket.socket) -> None:
    """Set the options of a connection with messages: nothing waits for an acknowledgement of what
    went before, and what is lost beside bulk is sent again soon, also the third time."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)


def share_of(bits_per_s: int, num_connections: int) -> int:
    """Limit of one of several connections, bytes per second; 0 is no limit."""
    share = bits_per_s // 8 // max(1, num_connections)
    return max(1, share) if bits_per_s else 0


def fit(connection: socket.socket, bytes_per_s: int, backlog_bytes: int) -> None:
    """Limit what the kernel sends of a connection. Works at any time.

    Args:
        bytes_per_s: Ceiling; 0 is none.
        backlog_bytes: What the socket holds beyond its congestion window.
    """
    rate = struct.pack("Q", bytes_per_s or _UNPACED)
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, backlog_bytes)


def restart_control(connection: socket.socket) -> None:
    """Restart BBR, as at the start of a connection; other congestion controls are not changed.

    It goes up by a quarter every eight round trips: a path that became ten times faster would be
    found after three seconds.
    """
    tcp = socket.IPPROTO_TCP
    control = connection.getsockopt(tcp, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    if control == CONGESTION_CONTROL:
        connection.setsockopt(tcp, socket.TCP_CONGESTION, b"reno")
        connection.setsockopt(tcp, socket.TCP_CONGESTION, control)


def keep_alive(connection: socket.socket) -> None:
    """Enable detection of a dead path by the kernel."""
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def keep_path_open(connection: socket.socket | TransportSocket) -> None:
    """Have the kernel send something on a connection that carries a request and is silent, as while
    an engine computes: address translators and firewalls forget silent connections without notice,
    and drop what comes later. A path that is gone is an error after 22 s.
    """
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, REQUEST_PROBE_S)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, REQUEST_PROBE_S)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, REQUEST_PROBES)


def request_socket(place: AddrInfo) -> socket.socket:
    """Make a socket for connections with requests to an address, as `getaddrinfo` returns it.

    With BBR the window outlives a pause: prompts of 120 KB, a second apart, take 1.5 to 2 round
    trips instead of the 3.2 of CUBIC and Reno, which begin anew.
    """
    family, kind, protocol, *_ = place
    connection = socket.socket(family, kind, protocol)
    _prefer_bbr(connection)
    keep_path_open(connection)
    return connection


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Fields of `linux/tcp.h` that links report."""

    rtt_ns: int
    window_segments: int
    retransmits: int
    acked_bytes: int
    delivery_bits_per_s: int
    min_rtt_ns: int = 0
    segments: int = 0
    """Segments with data sent so far, retransmissions included."""
    network_ns: int = 0
    """Time in which data was in transit and the receiver's window did not hold it up."""
    delivered_bytes: int = 0
    """Bytes of the segments that the peer has, in order or not: a segment that is missing holds
    `acked_bytes` up and lets them jump later; 0 if the kernel does not count them."""


def tcp_info(connection: socket.socket) -> TcpInfo:
    """State of a connection, from the kernel; OSError if it is closed."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    raw = raw.ljust(_TCP_INFO_BYTES, b"\0")
    words = struct.unpack_from("24I", raw, _U8_FIELDS)
    acked_bytes = struct.unpack_from("Q", raw, _U8_FIELDS + 24 * 4 + 16)[0]
    min_rtt_us, _, segments, delivery_rate = struct.unpack_from("=3IQ", raw, 148)
    busy_us, window_limited_us = struct.unpack_from("=2Q", raw, 168)
    delivered_segments = struct.unpack_from("I", raw, 192)[0]
    return TcpInfo(
        rtt_ns=words[15] * 1000,
        window_segments=words[18],
        retransmits=words[23],
        acked_bytes=acked_bytes,
        delivery_bits_per_s=min(delivery_rate * 8, RATE_BITS_PER_S_MAX),
        min_rtt_ns=min_rtt_us * 1000,
        segments=segments,
        network_ns=max(0, busy_us - window_limited_us) * 1000,
        delivered_bytes=delivered_segments * words[2],
    )


def raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else hard
    wanted = min(wanted, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
