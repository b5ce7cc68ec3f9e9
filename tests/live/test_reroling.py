"""An engine changes its role under load, its drain included, and no client notices.

Processes of timing engines, as `python -m benchmarks.reroling` runs them through a day.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.reroling.day import READ, WRITE, Kind
from benchmarks.reroling.live import MODEL, decisions, running
from benchmarks.reroling.load import Ask, one, prepare
from benchmarks.reroling.outcome import Outcome, Settings
from prfaas.cli.deploy.topology import Topology
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.sim.system.request import Request
from tests.live.conftest import until

NUM_READERS, NUM_WRITERS = 12, 6


def asks_of(kind: Kind, count: int, vocabulary: Vocabulary) -> list[Ask]:
    """Requests of one kind, each with another prompt."""
    low, high = kind.prompts
    lengths = [low + i * (high - low) // count for i in range(count)]
    asked = [Request(i, 0, length, kind.output) for i, length in enumerate(lengths)]
    return prepare(asked, MODEL, vocabulary)


async def client(url: str, asks: list[Ask], found: list[Outcome], is_over: asyncio.Event) -> None:
    """One request after the other."""
    async with aiohttp.ClientSession() as http:
        for ask in asks:
            found.append(await one(http, url, ask, time.monotonic()))
            if is_over.is_set():
                return


async def records_of(topology: Topology) -> list[dict[str, Any]]:
    """The gateway's records of requests."""
    url = f"{topology.gateway_url}/control/requests?limit=1000"
    async with aiohttp.ClientSession() as http, http.get(url) as reply:
        found: list[dict[str, Any]] = (await reply.json())["requests"]
        return found


@pytest.mark.timeout(180)
@pytest.mark.asyncio(loop_scope="session")  # `live` and its relay go on meanwhile
async def test_a_load_of_long_prompts_makes_a_decode_engine_prefill(tmp_path: Path) -> None:
    found: list[Outcome] = []
    is_over = asyncio.Event()
    # The plan is for three that prefill: it agrees before the gateway knows what requests are like.
    settings = Settings(dwell_s=8.0, num_prefill=2)
    async with running(settings, tmp_path, reroling=True) as topology:
        vocabulary = Vocabulary(str(topology.deployment.model.path))
        reads, writes = asks_of(READ, 900, vocabulary), asks_of(WRITE, 300, vocabulary)
        loads = [reads[i::NUM_READERS] for i in range(NUM_READERS)]
        loads += [writes[i::NUM_WRITERS] for i in range(NUM_WRITERS)]
        clients = [
            asyncio.create_task(client(topology.gateway_url, load, found, is_over))
            for load in loads
        ]

        async def changed() -> list[dict[str, Any]]:
            entries = await decisions(topology)
            return entries if any(e["action"] == "changed" for e in entries) else []

        entries = await until(changed, 120)
        actions = [entry["action"] for entry in entries]
        change = entries[actions.index("changed")]
        drains = [e for e in entries[: actions.index("changed")] if e["action"] == "drains"][-1]
        engine = str(change["what"]).removeprefix("engine ")

        async def has_prefilled() -> bool:
            records = await records_of(topology)
            return any(r["prefill_engine"] == engine != r["decode_engine"] for r in records)

        await until(has_prefilled, 60)
        is_over.set()
        await asyncio.gather(*clients)
        records = await records_of(topology)
    assert (drains["action"], drains["what"]) == ("drains", change["what"])
    assert (change["old"], change["new"]) == ("decode", "prefill")
    began_at, ended_at = drains["at_unix_s"], change["at_unix_s"]
    meanwhile = [r for r in records if began_at < r["started_at"] < ended_at]
    assert engine not in {r["decode_engine"] for r in meanwhile}, "it drains"
    assert engine in {r["decode_engine"] for r in records}
    assert {outcome.error for outcome in found} == {""}
