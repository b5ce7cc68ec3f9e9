"""The backend and a pool node in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.drill.processes import NodeProcess
from tests.engines.sglang.conftest import Engines, wait
from tests.engines.sglang.pages import HASHES, all_missing, kept


@pytest.fixture
async def node(identities: Path, tmp_path: Path) -> AsyncIterator[NodeProcess]:
    options = ["--memory", "1MiB", "--gateway", "gateway", "--identities", str(identities)]
    made = NodeProcess("pd-pool", tmp_path, options)
    await made.start()
    yield made
    os.kill(made.pid, signal.SIGCONT)
    await made.kill()


@pytest.mark.timeout(180)
async def test_a_frozen_process_is_a_miss_and_later_touches_no_page(
    node: NodeProcess, backend: Any
) -> None:
    engines = Engines(backend, node.socket)

    def use() -> None:
        engine = engines.start()
        pool, made = engine.pools["kv"], kept(engine)
        os.kill(node.pid, signal.SIGSTOP)
        places = [30, 31, 32, 33]
        before = [pool.fill(page, f"other {page}") for page in places]
        assert engine.batch_get_v1(HASHES[:4], pool.indices(places)) == [False] * 4
        all_missing(engine)
        os.kill(node.pid, signal.SIGCONT)
        wait(lambda: engine.is_connected)
        assert engine.batch_exists(HASHES) == 4
        assert [pool.page(page) for page in places] == before
        assert engine.batch_get_v1(HASHES[:4], pool.indices(places)) == [True] * 4
        assert [pool.page(page) for page in places] == made

    try:
        await asyncio.to_thread(use)
    finally:
        await asyncio.to_thread(engines.close)
