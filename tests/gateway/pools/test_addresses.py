"""A host of several addresses, of which one does not answer; connections that are silent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.gateway.pools.pool_client import PoolSubscription, PoolTiming
from prfaas.gateway.pools.subscription import Subscription
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.pool.net.tls_sockets import connect
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.gateway import Subscribe
from prfaas.wire.sockets import REQUEST_PROBE_S, request_socket
from tests.gateway.conftest import World, until
from tests.gateway.long_requests import BODY
from tests.gateway.scripted_engine import hang
from tests.gateway.scripted_pool import ScriptedPool

DEAD, NAME = "127.0.0.9", "two.addresses"


@pytest.fixture
async def dead_first(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A port of which the first address of a name takes no connection: its queue is full."""
    full = socket.create_server((DEAD, 0), backlog=0)
    port: int = full.getsockname()[1]
    waiting = []
    for _ in range(3):
        caller = socket.socket()
        caller.setblocking(False)
        caller.connect_ex((DEAD, port))
        waiting.append(caller)
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def both(host: str, *args: object, **more: object) -> Sequence[object]:
        if host != NAME:
            return await real(host, *args, **more)  # type: ignore[arg-type]
        kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
        return [(*kind, (DEAD, port)), (*kind, ("127.0.0.1", port))]

    monkeypatch.setattr(loop, "getaddrinfo", both)
    yield port
    for each in (full, *waiting):
        each.close()


async def test_a_pool_node_is_reached_at_its_second_address(
    dead_first: int, identities: Path
) -> None:
    pool = ScriptedPool("pd-pool", identities, port=dead_first)
    await pool.start()
    index = PrefixIndex()
    followed = Subscription("pd-pool", index, Transfers())
    tls = identity_in(identities, "gateway").client_context()
    client = PoolSubscription(
        "pd-pool", (NAME, dead_first), Subscribe(gateway="gateway"), tls, followed, PoolTiming()
    )
    task = asyncio.create_task(client.run())
    await until(lambda: pool.num_subscriptions == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await pool.stop()


async def test_a_data_connection_is_made_to_the_second_address(dead_first: int) -> None:
    with socket.create_server(("127.0.0.1", dead_first)):
        connection = await connect((NAME, dead_first))
        assert connection.getpeername() == ("127.0.0.1", dead_first)
        connection.close()


async def test_the_kernel_keeps_the_paths_of_legs_open(world: World) -> None:
    connector = world.gateway.engines._http.connector
    assert connector is not None
    assert connector._socket_factory is request_socket  # type: ignore[attr-defined]
    place = socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0)
    with request_socket(place) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == REQUEST_PROBE_S


async def test_the_kernel_keeps_the_paths_of_clients_open(world: World) -> None:
    """While an engine computes, nothing goes over them either."""
    world.prefill.script = hang
    hung = asyncio.create_task(world.post(BODY))
    await world.prefill.hanging.wait()
    (connection,) = world.gateway.connections._busy
    transport = connection.transport
    assert transport is not None
    plain = transport.get_extra_info("socket")
    assert plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == REQUEST_PROBE_S
    hung.cancel()
    await asyncio.gather(hung, return_exceptions=True)
