"""Rows of engines that lie, die or are given up: nothing of theirs harms the node or a block."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.engines.pool_client import ClientLimits
from prfaas.errors import PeerError
from prfaas.pool.engine.engine_memory import EngineMemory
from prfaas.wire.messages.engine import HIT, MISS, Load, Store
from prfaas.wire.messages.fields import wire_keys
from tests.drill.processes import NodeProcess
from tests.pool.conftest import World
from tests.pool.sites import NUM_ROWS, PADDING, PROMPT, ROW_BYTES, Engine, content, hello, until

KEY = BlockKey(0, b"k" * 32)


def rows_of(name: str) -> int:
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, ROW_BYTES * NUM_ROWS)
    return descriptor


@pytest.mark.parametrize("what", ["read", "write"])
async def test_memory_that_became_shorter_ends_its_engine_and_not_the_node(
    world: World, what: str
) -> None:
    """An access to a removed part of a mapping is a SIGBUS."""
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    before = engine.descriptor
    other = Engine("another", world.sockets / "pd-pool.sock", world.identities)
    world.engines.append(other)
    await other.connected()
    os.truncate(before, 0)
    if what == "read":
        keys = wire_keys([KEY])
        assert engine.send(Store(job=engine.job(), keys=keys, rows=[NUM_ROWS - 1]))
        await until(lambda: not engine.client.is_connected)
    else:
        # What is written makes the file longer again: no harm.
        job = Load(job=engine.job(), keys=wire_keys(PROMPT), rows=list(range(len(PROMPT))))
        assert (await engine.finish(job)).ok
    assert await other.store(PROMPT[:2])
    assert pd.held() == set(PROMPT)
    os.truncate(before, ROW_BYTES * NUM_ROWS)


def test_neighbouring_extents_are_one_copy_and_the_file_is_let_go_once() -> None:
    said = hello("e")
    said.extents = {0: [(0, 64), (64, 64)], 1: [(120, 64)]}
    descriptor = rows_of("e")
    memory = EngineMemory(descriptor, said)
    data = content(KEY)
    memory.write(KEY, 3, data)
    assert os.pread(descriptor, 128, 3 * ROW_BYTES) == data
    back = bytearray(128)
    memory.read(KEY, 3, memoryview(back))
    assert back == data
    memory.close()
    memory.close()
    with pytest.raises(PeerError, match="gone"):
        memory.read(KEY, 3, memoryview(back))


@pytest.fixture
async def node(identities: Path, tmp_path: Path) -> AsyncIterator[NodeProcess]:
    options = ["--memory", "1MiB", "--gateway", "gateway", "--identities", str(identities)]
    made = NodeProcess("pd-pool", tmp_path, options)
    await made.start()
    yield made
    os.kill(made.pid, signal.SIGCONT)
    await made.kill()


async def test_a_node_that_stands_still_is_given_up_and_later_touches_no_row(
    node: NodeProcess, identities: Path
) -> None:
    engine = Engine("engine", node.socket, identities, ClientLimits(silence_s=3.0))
    try:
        await engine.connected()
        assert await engine.store(PROMPT)
        os.kill(node.pid, signal.SIGSTOP)
        engine.memory[:] = bytes([PADDING]) * len(engine.memory)
        job = Load(job=engine.job(), keys=wire_keys(PROMPT), rows=list(range(len(PROMPT))))
        assert not any((await engine.finish(job)).loaded)
        late = [BlockKey(0, b"l" * 32)]
        assert not await engine.store(late)
        os.kill(node.pid, signal.SIGCONT)
        await engine.connected()
        assert await engine.look_up([*PROMPT[:1], *late]) == [HIT, MISS]
        assert set(engine.memory[ROW_BYTES:]) == {PADDING}
        assert (await engine.load(PROMPT)) == [True] * len(PROMPT)
    finally:
        await asyncio.to_thread(engine.close)


async def test_what_a_frozen_node_had_been_told_to_store_is_not_stored_later(
    node: NodeProcess, identities: Path
) -> None:
    """The rows have other blocks in them by then."""
    engine = Engine("engine", node.socket, identities, ClientLimits(silence_s=3.0))
    try:
        await engine.connected()
        os.kill(node.pid, signal.SIGSTOP)
        assert not await engine.store(PROMPT)
        engine.memory[:] = bytes(len(engine.memory))
        os.kill(node.pid, signal.SIGCONT)
        await engine.connected()
        assert await engine.look_up(PROMPT) == [MISS] * len(PROMPT)
    finally:
        await asyncio.to_thread(engine.close)


def test_rows_may_be_interleaved_and_lie_in_several_processes() -> None:
    said = hello("e")
    half = ROW_BYTES // 2
    said.row_bytes, said.row_span, said.num_rows = half, NUM_ROWS * half + 28, NUM_ROWS
    said.extents, said.elsewhere = {0: [(0, 100), (NUM_ROWS * half, 28)]}, [1]
    memory = EngineMemory(rows_of("e"), said)
    for row in (3, NUM_ROWS - 1):
        memory.write(KEY, row, bytes([row]) * 128)
    for row in (3, NUM_ROWS - 1):
        found = bytearray(128)
        memory.read(KEY, row, memoryview(found))
        assert found == bytes([row]) * 128
    with pytest.raises(PeerError, match=r"cache group 1; the engine announced \[0\]"):
        memory.check(BlockKey(1, b"k" * 32), 0)
    memory.close()
