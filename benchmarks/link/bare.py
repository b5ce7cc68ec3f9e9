"""The floor of a row: bytes over bare TCP connections, by blocking calls on a thread each.

    python -m benchmarks.link.bare receive ADDRESS NUM_CONNECTIONS
    python -m benchmarks.link.bare send ADDRESS NUM_CONNECTIONS BITS_PER_S

Neither encryption nor digests, blocks, messages or measurements: what the kernel and the lab take
of the CPU by themselves, with the socket options of a link and its pacing.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from prfaas.core.transfer.pacing import num_connections
from prfaas.wire.sockets import fit, prepare, share_of
from tests.lab.wan import Side, Wan

from .end import cpu_s, say
from .ours import End, both_ends
from .rows import Row

PORT = 7200
PIECE_BYTES = 256 << 10
ACK = b"."


def ends(wan: Wan, row: Row, budget: int) -> AbstractAsyncContextManager[tuple[End, End]]:
    """Both ends, connected by as many connections as a link has; sender and receiver."""
    count = str(num_connections(row.rate, round(row.rtt_ms * 1e6)))
    module, there = ["-m", "benchmarks.link.bare"], wan.address("b")
    receive = [*module, "receive", there, count]
    side: Side = "a" if row.rate else "b"
    return both_ends(wan, side, receive, [*module, "send", there, count, str(budget)])


async def send_and_take(sender: End, receiver: End, num_bytes: int) -> tuple[float, float, float]:
    """Send bytes; seconds, and CPU seconds so far of sender and receiver."""
    there, here = await asyncio.gather(
        receiver.ask(transfer=num_bytes), sender.ask(transfer=num_bytes)
    )
    return here["s"], here["cpu_s"], there["cpu_s"]


def each(connections: list[socket.socket], work: Callable[[socket.socket], None]) -> None:
    threads = [threading.Thread(target=work, args=[one]) for one in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def take(connection: socket.socket) -> None:
    """Read what the other end announces, and acknowledge the last byte."""
    left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
    room, ready = memoryview(bytearray(PIECE_BYTES)), select.poll()
    ready.register(connection, select.POLLIN)
    while left:
        wanted = min(left, PIECE_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        ready.poll()  # A call that has read a part would not be woken for a smaller rest.
        left -= connection.recv_into(room[:wanted])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    connection.sendall(ACK)


def give(connection: socket.socket, num_bytes: int) -> None:
    connection.sendall(num_bytes.to_bytes(8, "big"))
    piece = memoryview(bytearray(PIECE_BYTES))
    left = num_bytes
    while left:
        part = min(left, PIECE_BYTES)
        connection.sendall(piece[:part])
        left -= part
    connection.recv(1)


def receive(host: str, num_connections: int) -> None:
    with socket.create_server((host, PORT)) as server:
        say("ready")
        connections = [server.accept()[0] for _ in range(num_connections)]
        while sys.stdin.readline():
            each(connections, take)
            say({"cpu_s": cpu_s()})


def send(host: str, num_connections: int, bits_per_s: int) -> None:
    connections = []
    for _ in range(num_connections):
        one = socket.socket()
        prepare(one)
        one.connect((host, PORT))
        fit(one, share_of(bits_per_s, num_connections), 2 * PIECE_BYTES)
        connections.append(one)
    say("ready")
    while line := sys.stdin.readline():
        num_bytes = json.loads(line)["transfer"] // num_connections
        began = time.monotonic()
        each(connections, lambda one, size=num_bytes: give(one, size))  # type: ignore[misc]
        say({"s": time.monotonic() - began, "cpu_s": cpu_s(), "first_s": 0.0})


if __name__ == "__main__":
    role, address, *rest = sys.argv[1:]
    if role == "receive":
        receive(address, int(rest[0]))
    else:
        send(address, int(rest[0]), int(rest[1]))
