"""Bodies that the proxy does not read: a site that floods costs it little, and others nothing."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from prfaas.proxy.connections import GatewayConnection
from prfaas.proxy.turns import (
    BODY_BYTES_MAX,
    HELD_BYTES_MAX,
    REFUSED_BYTES_PER_S,
    SMALL_BYTES,
    TurnRefusedError,
    Turns,
)
from prfaas.units import NS_PER_S
from tests.pool.sites import until
from tests.ports import free_port

from .worlds import World, connect, running

MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n"
LONG = bytes(8 * MIB)
UNREAD_MAX = MIB
"""Bytes of a refused body that are in buffers before the sender has to stop."""


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that the proxy reads, by site."""
    counts = Counter[str]()
    receive = GatewayConnection.data_received

    def counted(self: GatewayConnection, data: bytes) -> None:
        counts[self._site or ""] += len(data)
        receive(self, data)

    monkeypatch.setattr(GatewayConnection, "data_received", counted)
    return counts


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def begin(
    world: World, stack: AsyncExitStack, num_bytes: int, engine: str = "engine"
) -> None:
    """Begin a prefill of site a whose body does not come; the stack ends it."""
    _, writer = await connect(world, "a", engine)
    stack.push_async_callback(_end, writer)
    writer.write(HEAD % num_bytes)


async def flood(world: World, num: int) -> list[tuple[int, str | None, str]]:
    """Post long bodies one after another; status, Retry-After and text of each answer."""
    answers = []
    for _ in range(num):
        url = f"{world.url}/v1/completions"
        async with world.sessions["a"].post(url, data=BytesIO(LONG)) as reply:
            answers.append((reply.status, reply.headers.get("Retry-After"), await reply.text()))
    return answers


REFUSED = (429, "1", '{"error": {"message": "refused: queue_full"}}')


async def test_bodies_that_come_fill_the_queue_and_no_other_is_read(
    tmp_path: Path, checkpoint: Path, received: Counter[str]
) -> None:
    async with running(tmp_path, checkpoint, "queued_max = 2") as world:
        coming = world.proxy._turns.coming
        async with AsyncExitStack() as stack:
            for _ in range(3):  # One for the slot, two to wait.
                await begin(world, stack, MIB)
            await until(lambda: "a" in coming and coming["a"]["engine"] == 3)
            assert await flood(world, 10) == [REFUSED] * 10
            assert received["a"] < 10 * UNREAD_MAX
            assert world.metric("refused_total", reason="queue_full") == 10
            assert world.metric("requests_total", site="a", outcome="refused") == 10
            assert await world.post("b") == 200
        await until(lambda: not coming["a"]["engine"])
        assert await world.post("a") == 200


async def test_a_body_is_not_read_while_the_queue_is_full(
    tmp_path: Path, checkpoint: Path, received: Counter[str]
) -> None:
    async with running(tmp_path, checkpoint, "queued_max = 1") as world:
        turns = world.proxy._turns
        async with turns.turn("b", "engine", 100):
            waits = asyncio.create_task(world.post("a"))
            await until(lambda: turns.queue.waiting_of("a", "engine") == 1)
            before = received["a"]
            assert await flood(world, 3) == [REFUSED] * 3
            assert received["a"] - before < 3 * UNREAD_MAX
        assert await waits == 200


async def test_the_limit_of_bytes_is_one_for_all_engines(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint, other=free_port()) as world, AsyncExitStack() as stack:
        num = HELD_BYTES_MAX // BODY_BYTES_MAX
        for each in range(num):
            await begin(world, stack, BODY_BYTES_MAX, ("engine", "other")[each % 2])
        coming = world.proxy._turns.coming
        await until(lambda: "a" in coming and coming["a"].total() == num)
        assert await world.post("a") == 429
        assert world.metric("refused_total", reason="memory") == 1
        assert await world.post("b") == 200


async def test_a_gateway_that_goes_on_sending_is_not_read_and_ends(
    tmp_path: Path, checkpoint: Path, received: Counter[str]
) -> None:
    async with running(tmp_path, checkpoint) as world, AsyncExitStack() as stack:
        world.proxy.connections.linger_s = 0.2
        reader, writer = await connect(world, "a")
        stack.callback(writer.transport.abort)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: 1000000000\r\n\r\n"
        )
        writer.write(LONG)
        assert b" 429 " in await reader.readline()
        with suppress(ConnectionError):
            while await reader.read(MIB):
                pass
        await until(lambda: world.proxy.connections["a"] == 0)
        assert received["a"] < UNREAD_MAX


async def test_a_compressed_body_is_not_read(tmp_path: Path, checkpoint: Path) -> None:
    """Its length says nothing of what it becomes."""
    async with running(tmp_path, checkpoint) as world:
        url = f"{world.url}/v1/completions"
        headers = {"Content-Encoding": "gzip", "Content-Length": "20"}
        async with world.sessions["a"].post(url, data=bytes(20), headers=headers) as reply:
            assert reply.status == 415
        assert await world.post("a") == 200


async def test_bodies_that_are_refused_are_charged(tmp_path: Path, checkpoint: Path) -> None:
    """A site that has them read in vain has no more long ones read for a while; others have."""
    async with running(tmp_path, checkpoint) as world:
        url, data = f"{world.url}/v1/completions", b'{"model": 5' + LONG
        async with world.sessions["a"].post(url, data=BytesIO(data)) as reply:
            assert reply.status == 400
        refused = (429, "1", '{"error": {"message": "refused: refusals"}}')
        assert await flood(world, 2) == [refused] * 2
        assert world.metric("refused_total", reason="refusals") == 2
        # What is short costs no more than its refusal.
        assert await world.post("a") == 200
        async with world.sessions["b"].post(url, data=BytesIO(data)) as reply:
            assert reply.status == 400


def test_a_charge_ends() -> None:
    now_ns = 0
    intake = Turns({"engine": 1}, lambda: now_ns)
    intake.refused("a", REFUSED_BYTES_PER_S * 2)
    with pytest.raises(TurnRefusedError), intake.hold("a", SMALL_BYTES + 1):
        pass
    with intake.hold("a", SMALL_BYTES):
        pass
    now_ns = 2 * NS_PER_S
    with intake.hold("a", SMALL_BYTES + 1):
        pass


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"prompt": [1, 2**32]}, 400),
        ({"prompt": [0] * 100_000 + [-1]}, 400),
        ({"prompt": [1, "2"]}, 400),
        ({"prompt": [[1]]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": "text"}, 400),
        ({"prompt": [1.5]}, 400),
        ({"kv_transfer_params": {"prfaas": {"a": [[]] * 100}}}, 400),
        ({"kv_transfer_params": 5}, 400),
        ({"prompt": list(range(200)), "kv_transfer_params": None}, 200),
    ],
)
async def test_token_ids_and_orders_are_checked(
    tmp_path: Path, checkpoint: Path, changes: dict[str, Any], status: int
) -> None:
    async with running(tmp_path, checkpoint) as world:
        assert await world.post("a", **changes) == status
        assert await world.post("a") == 200
