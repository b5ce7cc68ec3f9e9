"""A cut transfer of a hybrid prompt, real engines: decode resumes at the last state that came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.cli.deploy.topology import parts
from tests.deployments import LAPTOP, laid_out, placed, put_between, started
from tests.live.conftest import Live, document, gateway_over, until
from tests.live.relay import Relay

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(300)]

INTERVAL = 1920
"""Of the states that the engine keeps: five blocks, what its steps of 2,048 tokens have."""
SETTINGS = f"""
[clusters.prfaas.engines.prfaas-engine]
args = ["--max-num-batched-tokens", "2048", "--mamba-ssm-cache-dtype", "float32",
        "--block-size", "384", "--prefix-cache-retention-interval", "{INTERVAL}"]
"""
LONG = 12_000
LINK_BYTES_PER_S = 1_500_000
"""Slow enough that the link breaks when prefill is over."""
CUT_AT_BYTES = 4_000_000
"""Some 60 % of what the prompt has."""


async def hits(live: Live) -> int:
    """Tokens that the decode engine has found in its pool node."""
    url = live.topology.engines["pd-engine"]
    return int(await live.metric(url, "vllm:external_prefix_cache_hits_total"))


async def cut(live: Live, spacing: int, tag: str) -> tuple[str, dict[str, Any], int]:
    """Ask for a long prompt, and let the link go silent in the middle of its transfer.

    Args:
        live: What runs.
        spacing: Of checkpoints, tokens; 0 is none.
        tag: Makes the prompt one that nobody holds.

    Returns:
        The answer, the gateway's record, and the prompt's tokens that decode found.
    """
    deployment = live.topology.deployment
    routing = deployment.routing.model_copy(update={"state_checkpoints": spacing})
    async with gateway_over(live, deployment.model_copy(update={"routing": routing})) as (_, over):
        await over.remote_again(f"before {tag}")
        known = await hits(live)
        live.relay.bytes_per_s = LINK_BYTES_PER_S
        before = live.relay.forwarded
        asking = asyncio.create_task(over.chat(f"[{tag}] " + document(LONG)))
        try:

            async def is_far() -> bool:
                return live.relay.forwarded >= before + CUT_AT_BYTES

            await until(is_far)
            live.relay.hold()
            answer, headers = await asking
            found = await hits(live) - known
        finally:
            live.relay.bytes_per_s = 0
            live.relay.release()
        record = await over.record(headers["X-Request-Id"])
        await over.remote_again(tag)
    return str(answer["choices"][0]["message"]["content"]), record, found


@asynccontextmanager
async def keeping_states(local: Path) -> AsyncIterator[Live]:
    """The laptop's deployment, whose prefill engine keeps a state every `INTERVAL` tokens."""
    topology = await laid_out(*placed(LAPTOP, local, SETTINGS))
    stages, relay = parts(topology), Relay(topology.pools["pd-pool"])
    put_between(stages, "prfaas-pool", "pd-pool", await relay.start())
    try:
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            yield Live(topology, supervisor, relay, http)
    finally:
        await relay.stop()


async def test_decode_resumes_where_a_state_came_whole(tmp_path: Path) -> None:
    async with keeping_states(tmp_path) as live:
        for spacing in (0, INTERVAL):
            tag = f"checkpoints of {spacing}"
            answer, record, found = await cut(live, spacing, tag)
            assert record["fallback"] is not None
            assert record["fallback"]["stage"] == "transfer"
            assert answer == await live.alone(f"[{tag}] " + document(LONG), tag)
            print(f"spacing {spacing}: decode found {found:,} tokens")
            assert (found > 0) == (spacing > 0)
            assert found % INTERVAL == 0
