"""Link tests against a real pool node: who may, how much, and that nothing comes of it."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import pytest

from prfaas.core.transfer.tcp_goodput import Probe
from prfaas.errors import PeerError, TransferError
from prfaas.pool.net.link_probe import ProbeLimits, ProbeServer, probe
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.base import Goodbye
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.link import Offer
from tests.pool.conftest import World
from tests.pool.sites import LOOPBACK, PROMPT, Site, until


async def measured(
    port: int, identities: Path, *, name: str = "prfaas-pool", peer: str = "pd-pool", count: int = 2
) -> Probe:
    tls = identity_in(identities, name).dialling().probe
    found, control = await probe(
        (LOOPBACK, port), tls, peer, num_connections=count, seconds=0.2, warm_up_s=0.05
    )
    assert control
    return found


async def still_serves(world: World, pd: Site) -> None:
    """Blocks arrive as ever, and of the tests nothing is left."""
    prfaas = await world.start("prfaas-pool")
    await world.linked(prfaas, pd)
    prefill = await world.engine("prfaas-pool")
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.held() == set(PROMPT))


async def test_a_source_measures_its_path_and_leaves_nothing_behind(world: World) -> None:
    pd = await world.start_pd()
    found = await measured(pd.port, world.identities)
    assert found.num_connections == 2
    assert found.goodput_bits_per_s > 0
    assert 0 < found.rtt_ns <= found.loaded_rtt_ns
    assert found.segments > 0
    assert pd.held() == set()
    assert pd.metric("connections_refused_total", port="link") == 0
    await still_serves(world, pd)


@pytest.mark.parametrize("name", ["stranger", "gateway"])
async def test_only_sources_may_test(world: World, name: str) -> None:
    pd = await world.start_pd()
    with pytest.raises(TransferError, match=r"no link test with pd-pool at 127\.0\.0\.1"):
        await measured(pd.port, world.identities, name=name)
    await until(lambda: pd.metric("connections_refused_total", port="link") >= 1)
    await still_serves(world, pd)


async def test_another_pool_than_was_asked_for_is_not_tested(world: World) -> None:
    pd = await world.start_pd()
    with pytest.raises(PeerError, match="pd-pool"):
        await measured(pd.port, world.identities, peer="other-pool")


@pytest.mark.parametrize(
    "limits", [ProbeLimits(bytes_max=1 << 20), ProbeLimits(seconds_max=0.1)], ids=["bytes", "time"]
)
async def test_a_test_that_goes_on_for_too_long_is_ended(world: World, limits: ProbeLimits) -> None:
    pd = await world.start_pd(probes=limits)
    with pytest.raises(TransferError, match="no link test"):
        await measured(pd.port, world.identities)
    await still_serves(world, pd)


async def test_no_more_connections_are_tested_than_the_limit(world: World) -> None:
    pd = await world.start_pd(probes=ProbeLimits(connections_max=2))
    with pytest.raises(TransferError):
        await measured(pd.port, world.identities, count=3)
    # Two go, once those of the test before are gone.
    while True:
        try:
            await measured(pd.port, world.identities)
        except TransferError:
            continue
        break


async def test_where_nobody_listens_the_error_says_where(world: World) -> None:
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransferError, match=f"127.0.0.1:{port}"):
        await measured(port, world.identities)


async def test_a_server_without_a_pool_node_takes_tests_and_nothing_else(identities: Path) -> None:
    tls = identity_in(identities, "pd-pool").accepting()
    server = ProbeServer((LOOPBACK, 0), tls, frozenset({"prfaas-pool"}))
    server.open()
    assert (await measured(server.port, identities)).goodput_bits_per_s > 0
    dialling = identity_in(identities, "prfaas-pool").dialling()
    for context in (dialling.messages, dialling.data):
        answer = b""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(LOOPBACK, server.port, ssl=context)
            writer.write(encode(Offer(transfer_id=b"t" * 16)))
            answer = await reader.read()
            writer.transport.abort()
        assert answer in (b"", encode(Goodbye(reason="you are not on the list here")))
    assert (await measured(server.port, identities)).goodput_bits_per_s > 0
    await server.close()


async def test_callers_that_say_nothing_keep_no_pool_from_testing(world: World) -> None:
    """Of strangers the one that waits longest has to go; it is counted."""
    limits = ProbeLimits(connections_max=4)
    pd = await world.start_pd(probes=limits)
    context = identity_in(world.identities, "stranger").dialling().probe
    silent = []
    for _ in range(limits.connections_max + 3):
        connection = await asyncio.to_thread(socket.create_connection, (LOOPBACK, pd.port))
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(into, out).do_handshake()
        connection.sendall(out.read())
        silent.append(connection)
    await until(lambda: pd.metric("connections_refused_total", port="link") >= 3)
    await measured(pd.port, world.identities)
    for connection in silent:
        connection.close()
    await still_serves(world, pd)
