"""Hostile streams into the port of a running pool node."""

import asyncio
import contextlib
import random
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.link import Join, PoolHello
from tests.drill.processes import LOOPBACK, NodeProcess, Observer

from .streams import mutated

RANDOM_BYTES = 20_000
"""Of one connection."""
ANSWER_S = 20.0
AT_ONCE = 64
RSS_GROWTH_MAX = 64 << 20


@dataclass
class PortFigures:
    """Counts of an attack by strangers.

    Attributes:
        num_streams: Connections, a stream in each.
        num_bytes: Of all.
        num_refused: Connections that it closed for what they said or were.
        rss_growth: Resident memory afterwards over that before, bytes.
    """

    num_streams: int = 0
    num_bytes: int = 0
    num_refused: int = 0
    rss_growth: int = 0


@asynccontextmanager
async def a_node(directory: Path) -> AsyncIterator[NodeProcess]:
    make_authority(directory)
    for name in ("pd-pool", "prfaas-pool", "gateway", "stranger"):
        make_identity(directory, name)
    options = ["--memory", "64MiB", "--source", "prfaas-pool", "--gateway", "gateway"]
    node = NodeProcess("pd-pool", directory, options)
    await node.start()
    try:
        yield node
    finally:
        await node.kill()


async def attack(
    directory: Path, num_random_bytes: int, num_mutated: int, seed: int
) -> PortFigures:
    """Half of everything without TLS or by strangers, the rest by peers that are let in.

    Raises:
        AssertionError: The node is gone, serves nobody any more, or has grown.
    """
    chance, figures = random.Random(seed), PortFigures()
    async with a_node(directory) as node:
        await _say(node, directory, "plain", b"warm", figures)
        before = node.resident_bytes()
        for start in range(0, num_random_bytes, RANDOM_BYTES * AT_ONCE):
            left = num_random_bytes - start
            sizes = [min(RANDOM_BYTES, left - i * RANDOM_BYTES) for i in range(AT_ONCE)]
            await asyncio.gather(
                *(
                    _say(node, directory, chance.choice(CALLERS), chance.randbytes(size), figures)
                    for size in sizes
                    if size > 0
                )
            )
        for start in range(0, num_mutated, AT_ONCE):
            await asyncio.gather(
                *(
                    _say(node, directory, chance.choice(CALLERS), mutated(chance), figures)
                    for _ in range(min(AT_ONCE, num_mutated - start))
                )
            )
        await still_serves(node, directory)
        metrics = await node.metrics()
        figures.num_refused = round(metrics["prfaas_connections_refused_total"])
        figures.rss_growth = node.resident_bytes() - before
        assert figures.rss_growth < RSS_GROWTH_MAX, f"{figures.rss_growth} bytes more"
        assert "Traceback" not in node.log.read_text(), f"an error nobody expected: {node.log}"
    return figures


CALLERS = [
    "plain",
    "stranger",
    "gateway",
    "prfaas-pool",
    "prfaas-pool welcomed",
    "data",
    "data joined",
]


async def _say(
    node: NodeProcess, directory: Path, caller: str, stream: bytes, figures: PortFigures
) -> None:
    """One connection that says these bytes and waits to be left, or leaves."""
    first = b""
    if caller == "prfaas-pool welcomed":
        first = encode(PoolHello(pool="prfaas-pool", epoch="e", link=secrets.token_hex(8)))
    if caller == "data joined":
        first = encode(Join(pool="prfaas-pool", link="l", number=1))
    figures.num_streams += 1
    figures.num_bytes += len(stream)
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(
            LOOPBACK, node.port, ssl=_context(directory, caller)
        )
        writer.write(first + stream)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
                    await reader.read(1 << 16)
        writer.transport.abort()


def _context(directory: Path, caller: str) -> ssl.SSLContext | None:
    if caller == "plain":
        return None
    if caller.startswith("data"):
        return identity_in(directory, "prfaas-pool").dialling().data
    return identity_in(directory, caller.split(maxsplit=1)[0]).client_context()


async def still_serves(node: NodeProcess, directory: Path) -> None:
    """A gateway gets its snapshot."""
    observer = await Observer.of(node, directory)
    try:
        async with asyncio.timeout(ANSWER_S):
            while not observer.is_complete:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
    finally:
        observer.stop()
