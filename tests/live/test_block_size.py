"""A hybrid whose engines were not told a block size: what is shipped is found all the same."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.deploy.topology import parts
from tests.deployments import LAPTOP, laid_out, placed, started
from tests.live.conftest import Live, document, until
from tests.live.relay import Relay

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]
SAID = ', "--block-size", "384"'


async def test_a_hybrid_without_a_block_size_finds_all_that_was_shipped(tmp_path: Path) -> None:
    """Prompts whose last state lies at the end of a chunk of prefill, and others."""
    file, overlay = placed(LAPTOP, tmp_path)
    assert SAID in file.read_text()
    file.write_text(file.read_text().replace(SAID, ""))
    topology = await laid_out(file, overlay)
    async with started(parts(topology)) as supervisor, aiohttp.ClientSession() as http:
        live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
        await until(lambda: _is_ready(live))
        for num_chars in (1600, 2000, 2300, 2700, 3500, 6000):
            text = f"[{num_chars}] " + document(num_chars)
            answer, headers = await live.chat(text, max_tokens=4)
            record = await live.record(headers["X-Request-Id"])
            assert (record["path"], record["fallback"]) == ("remote", None)
            assert answer["usage"]["completion_tokens"] == 4


async def _is_ready(live: Live) -> bool:
    async with live.http.get(f"{live.url}/health?full=1") as reply:
        return reply.status == 200
