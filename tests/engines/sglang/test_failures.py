"""A pool node that is lost or slow: a miss within the time limit, never an error."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.engines.sglang.pool_calls import CALL_KEYS_MAX
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.messages.base import Ping
from prfaas.wire.messages.codec import AnyMessage, decode, encode
from prfaas.wire.messages.engine import Load, LoadDone, Lookup, LookupDone, Store, StoreDone
from tests.engines.sglang import names
from tests.engines.sglang.conftest import Engines, PoolThread, wait
from tests.engines.sglang.host_pools import HostPool
from tests.engines.sglang.pages import HASHES, all_missing, kept

WAIT_S = 0.2


def test_without_a_pool_node_everything_is_missing(engines: Engines) -> None:
    all_missing(engines.start(waits=False))


def test_a_lost_pool_node_is_a_miss_until_it_is_back(
    engines: Engines, pool_node: PoolThread
) -> None:
    engine = engines.start()
    made = kept(engine)
    pool_node.run(pool_node.site.kill())
    wait(lambda: not engine.is_connected)
    all_missing(engine)
    pool_node.run(pool_node._start())
    wait(lambda: engine.is_connected)
    assert engine.batch_exists(HASHES) == 0
    assert kept(engine) == made
    assert engine.batch_exists(HASHES) == 4


class Scripted:
    """A pool node's socket that accepts engines, and answers what a test chooses."""

    def __init__(self, path: Path) -> None:
        self.messages: list[AnyMessage] = []
        self.descriptors: list[int] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.answer: Any = lambda _: None
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        self.descriptors += descriptors
        connection.sendall(encode(Ping()))
        while data:
            for frame in decoder.feed(data):
                message = decode(frame.payload)
                self.messages.append(message)
                answer = self.answer(message)
                if answer is not None:
                    connection.sendall(encode(answer))
            try:
                data = connection.recv(1 << 18)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    made = Scripted(tmp_path / "pool.sock")
    yield made
    made.close()


@pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1"])
def test_a_pool_node_that_never_answers_is_hung_up_on_before_the_pages_are_free(
    engines: Engines, scripted: Scripted, call: str
) -> None:
    engine = engines.start(prfaas_wait_s=WAIT_S)
    first = scripted.connections[0]
    began = time.monotonic()
    indices = engine.pools["kv"].indices([0])
    assert getattr(engine, call)(HASHES[:1], indices) == [False]
    assert time.monotonic() - began >= WAIT_S
    # The pool node sees the end of the connection: it touches no page any more.
    wait(lambda: any(isinstance(each, Load | Store) for each in scripted.messages))
    first.settimeout(10)
    wait(lambda: len(scripted.connections) > 1)
    wait(lambda: engine.is_connected)


def test_answers_with_other_keys_and_of_other_jobs_are_misses(
    engines: Engines, scripted: Scripted
) -> None:
    def answer(message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Store):
            return StoreDone(job=message.job, stored=False)
        if isinstance(message, Load):
            return LoadDone(job=message.job, loaded=b"\1" * 9)
        if isinstance(message, Lookup):
            return LookupDone(job=message.job, found=b"\1\1\1")
        return None

    scripted.answer = answer
    all_missing(engines.start(prfaas_wait_s=5))


@pytest.mark.parametrize(
    ("hashes", "num"),
    [
        (["", *HASHES[:2]], 0),
        ([HASHES[0], "x" * 64, HASHES[1]], 1),
        ([HASHES[0], HASHES[1][:62]], 1),
        ([*HASHES[:4], HASHES[0].upper() + "0"], 4),
    ],
)
def test_what_is_no_hash_ends_the_prefix(
    engines: Engines, pool_node: PoolThread, hashes: list[str], num: int
) -> None:
    engine = engines.start()
    kept(engine)
    assert engine.batch_exists(hashes) == num
    assert engine.batch_exists_v2(hashes, []).kv_hit_pages == num
    indices = engine.pools["kv"].indices(list(range(len(hashes))))
    assert engine.batch_get_v1(hashes, indices) == [False] * len(hashes)


@pytest.mark.parametrize("indices", [[0], list(range(1, 17)), list(range(640, 656)), [-16] * 16])
def test_indices_of_no_whole_page_move_nothing(
    engines: Engines, pool_node: PoolThread, indices: list[int]
) -> None:
    import torch

    engine = engines.start()
    kept(engine)
    before = bytes(engine.pools["kv"].kv_buffer.tolist())
    assert engine.batch_get_v1(HASHES[:1], torch.tensor(indices)) == [False]
    assert engine.batch_set_v1(HASHES[9:10], torch.tensor(indices)) == [False]
    assert bytes(engine.pools["kv"].kv_buffer.tolist()) == before
    assert engine.batch_exists(HASHES[9:10]) == 0


def test_a_call_looks_up_a_limited_number_of_pages(engines: Engines, pool_node: PoolThread) -> None:
    engine = engines.start()
    kept(engine, 1)
    assert engine.batch_exists(HASHES[:1] * (CALL_KEYS_MAX + 10)) == CALL_KEYS_MAX


def test_a_full_pool_node_keeps_nothing_and_says_so(identities: Path, engines: Engines) -> None:
    node = PoolThread(identities, engines._socket_path, memory_bytes=64 << 10)
    try:
        engine = engines.start({"kv": HostPool(num_pages=40, part_bytes=64 << 10)})
        indices = engine.pools["kv"].indices([0])
        assert engine.batch_set_v1(HASHES[:1], indices) == [False]
        assert engine.batch_exists(HASHES[:1]) == 0
    finally:
        node.close()


def test_weights_that_were_replaced_share_nothing(
    engines: Engines, pool_node: PoolThread, context: names.Context
) -> None:
    engine = engines.start()
    kept(engine)
    context.bags["serving"].put("weight_version", "2")
    all_missing(engine)
    context.bags["serving"].put("weight_version", "default")
    all_missing(engine)


def test_a_store_names_the_pools_of_the_pages_before_it(
    engines: Engines, scripted: Scripted
) -> None:
    def answer(message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Load):
            return LoadDone(job=message.job, loaded=b"\1", sources=["prfaas-pool"])
        return StoreDone(job=message.job, stored=True) if isinstance(message, Store) else None

    scripted.answer = answer
    engine, info = engines.start(), names.sglang().HiCacheStorageExtraInfo
    indices = engine.pools["kv"].indices([0])

    def sources(prefix: list[str] | None) -> list[str]:
        assert engine.batch_set_v1(HASHES[5:6], indices, info(prefix_keys=prefix)) == [True]
        found = scripted.messages[-1]
        assert isinstance(found, Store)
        return found.sources

    assert sources([]) == []
    engine.batch_get_v1(HASHES[:1], indices, info(prefix_keys=[]))
    assert sources(HASHES[:5]) == ["prfaas-pool"]
    assert sources(HASHES[1:5]) == []
    # Without the names before it, every page may follow from one that was loaded.
    engine.batch_get_v1(HASHES[:1], indices, None)
    assert sources(HASHES[1:5]) == ["prfaas-pool"]


def test_pages_are_not_dropped_for_one_engine(
    engines: Engines, pool_node: PoolThread, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines.start()
    kept(engine)
    assert engine.clear() is False
    assert "prfaas ctl purge" in caplog.text
    assert engine.batch_exists(HASHES) == 4
