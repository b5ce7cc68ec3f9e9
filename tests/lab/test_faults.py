"""The fault proxy breaks connections as networks do."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from tests.lab.faults import Fault, FaultProxy


@dataclass
class Echo:
    """A server that sends back what it gets."""

    ended: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
            self.ended.append("end")
        except ConnectionResetError:
            self.ended.append("reset")
        writer.transport.abort()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def echo(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.readexactly(len(data))


@dataclass
class Rig:
    """A proxy before an echo."""

    proxy: FaultProxy
    echo: Echo
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        made = Client(*await asyncio.open_connection("127.0.0.1", self.proxy.port))
        self.clients.append(made)
        return made


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    proxy = FaultProxy(server.sockets[0].getsockname()[:2])
    await proxy.open()
    made = Rig(proxy, echo)
    yield made
    for client in made.clients:
        client.writer.transport.abort()
    await proxy.close()
    server.close()


async def test_it_carries_bytes_both_ways_and_counts_them(rig: Rig) -> None:
    client = await rig.client()
    data = bytes(range(256)) * 4000
    assert await client.echo(data) == data
    assert rig.proxy.num_bytes == len(data)


async def test_a_cut_ends_one_connection_and_leaves_the_others(rig: Rig) -> None:
    first, second = await rig.client(), await rig.client()
    assert await first.echo(b"1") + await second.echo(b"2") == b"12"
    rig.proxy.strike(Fault.CUT, 0)
    assert await first.reader.read() == b""
    assert await second.echo(b"still") == b"still"
    assert rig.proxy.num_connections == 1


async def test_a_reset_is_a_reset(rig: Rig) -> None:
    client = await rig.client()
    assert await client.echo(b"1") == b"1"
    rig.proxy.strike(Fault.RESET)
    with pytest.raises(ConnectionResetError):
        await client.reader.read()


async def test_half_open_is_silence(rig: Rig) -> None:
    client = await rig.client()
    assert await client.echo(b"1") == b"1"
    rig.proxy.strike(Fault.HALF_OPEN)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.echo(b"2")
    assert rig.proxy.num_connections == 1
    assert rig.echo.ended == []


async def test_corruption_flips_one_bit_once(rig: Rig) -> None:
    client = await rig.client()
    assert await client.echo(b"1") == b"1"
    rig.proxy.strike(Fault.CORRUPT)
    assert await client.echo(b"abc") == b"acc"
    assert await client.echo(b"abc") == b"abc"


async def test_a_slow_reader_takes_its_time(rig: Rig) -> None:
    client = await rig.client()
    rig.proxy.read_bits_per_s = 8 * 10_000
    loop = asyncio.get_running_loop()
    began = loop.time()
    await client.echo(bytes(2000))
    assert loop.time() - began >= 0.15


async def test_connections_share_the_rate_of_a_slow_link(rig: Rig) -> None:
    first, second = await rig.client(), await rig.client()
    rig.proxy.link_bits_per_s = 8 * 100_000
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(first.echo(bytes(8000)), second.echo(bytes(8000)))
    # Each by itself would have taken half as long.
    assert loop.time() - began >= 0.15


async def test_a_far_target_answers_late_and_in_order(rig: Rig) -> None:
    rig.proxy.delay_s = 0.05
    rig.proxy.link_bits_per_s = 10**8
    client = await rig.client()
    loop = asyncio.get_running_loop()
    began = loop.time()
    data = bytes(range(256)) * 1000
    assert await client.echo(data) == data
    assert loop.time() - began >= 0.1


async def test_unplugged_it_resets_whoever_comes(rig: Rig) -> None:
    rig.proxy.is_plugged = False
    client = await rig.client()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await client.echo(b"1")
    rig.proxy.is_plugged = True
    assert await (await rig.client()).echo(b"1") == b"1"
