"""A stalled pool node reads hellos of connections that are over: the present one stays."""

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import pytest

from prfaas.engines.pool_client import ClientLimits
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.gateway import PoolState, Subscribe
from prfaas.wire.messages.link import PoolHello, Resumed
from tests.ports import free_port

from .conftest import World
from .sites import LOOPBACK, NUM_ROWS, ROW_BYTES, Engine, dial, dial_port, hello, until

STALLS, HELLOS = 3, 20


def called(path: Path) -> socket.socket:
    """A connection of an engine that has said nothing yet."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.connect(str(path))
    return caller


def has_lost(errors: Path, number: int) -> bool:
    return errors.read_text().count("engine_gone") >= number


async def layouts(port: int, identities: Path) -> set[str]:
    """Engines that a pool node reports to a gateway."""
    gateway = await dial_port(port, identities, "gateway")
    gateway.channel.send(Subscribe(gateway="gateway"))
    await until(lambda: gateway.of(PoolState))
    state = gateway.of(PoolState)[0]
    gateway.channel.close("done")
    await until(lambda: gateway.closed)
    assert isinstance(state, PoolState)
    return set(state.layouts)


def say(caller: socket.socket, name: str) -> None:
    """Send the hello of an engine, and hang up."""
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, ROW_BYTES * NUM_ROWS)
    with caller:
        socket.send_fds(caller, [encode(hello(name))], [descriptor])
    os.close(descriptor)


async def test_a_hello_of_an_earlier_connection_changes_nothing(
    world: World, identities: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await world.start_pd()
    early = called(pd.node.settings.socket_path)
    engine = await world.engine("pd-pool")
    name = "engine-of-pd-pool"
    present = pd.node.engine_room.engines[name]
    with caplog.at_level(logging.INFO):
        say(early, name)
        await until(lambda: "engine_gone" in caplog.text)
    assert pd.node.engine_room.engines.get(name) is present
    assert engine.client.is_connected
    assert await layouts(pd.port, identities) == {name}
    assert "engine_name_taken" not in caplog.text


async def test_the_earlier_of_two_engines_of_a_name_is_there_when_the_later_one_ends(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await world.start_pd()
    await world.engine("pd-pool")
    name = "engine-of-pd-pool"
    first = pd.node.engine_room.engines[name]
    second = await world.engine("pd-pool")
    await until(lambda: pd.node.engine_room.engines[name] is not first)
    assert "engine_name_taken" in caplog.text
    world.engines.remove(second)
    await asyncio.to_thread(second.close)
    await until(lambda: pd.node.engine_room.engines.get(name) is first)


async def test_a_hello_of_a_pools_earlier_connection_does_not_end_its_present_one(
    world: World, identities: Path
) -> None:
    pd = await world.start_pd()
    earlier = await dial(pd, identities, "prfaas-pool")
    await until(lambda: len(pd.node.inbound.channels.tasks) == 1)
    later = await dial(pd, identities, "prfaas-pool")
    await until(lambda: len(pd.node.inbound.channels.tasks) == 2)
    earlier.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link="earlier"))
    await until(lambda: earlier.closed)
    later.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link="later"))
    await until(lambda: any(isinstance(m, Resumed) for m in later.messages))
    assert not later.closed
    later.channel.close("done")


@pytest.mark.timeout(120)
async def test_an_engine_is_known_after_each_stall_of_its_pool_node(
    identities: Path, tmp_path: Path
) -> None:
    path, port, errors = tmp_path / "pool.sock", free_port(), tmp_path / "log"
    command = ["-m", "prfaas", "pool", "--name", "pd-pool", "--memory", "1MiB"]
    command += ["--listen", f"{LOOPBACK}:{port}", "--admin", f"{LOOPBACK}:{free_port()}"]
    command += ["--socket", str(path), "--gateway", "gateway", "--identities", str(identities)]
    with errors.open("wb") as log:
        node = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=log)
    engine = Engine("engine", path, identities, ClientLimits(retry_s=0.01, silence_s=1.5))
    try:
        await engine.connected()
        for number in range(1, STALLS + 1):
            node.send_signal(signal.SIGSTOP)
            await until(lambda: not engine.client.is_connected)
            for _ in range(HELLOS):
                await asyncio.to_thread(lambda: say(called(path), "engine"))
            node.send_signal(signal.SIGCONT)
            gone = number * (HELLOS + 1)
            await until(partial(has_lost, errors, gone))
            await engine.connected()
            assert await layouts(port, identities) == {"engine"}
    finally:
        node.send_signal(signal.SIGCONT)
        node.terminate()
        await node.wait()
        await asyncio.to_thread(engine.close)
