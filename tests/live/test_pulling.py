"""A prefix that only the PrfaaS pool holds comes to a prompt that real engines prefill at home."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.routing import RoutingTable
from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from tests.live.conftest import Live, document, gateway_over, until
from tests.live.handoff_sizes import ATTENTION_GROUP, BLOCK_TOKENS, LINEAR_GROUPS, planned_bytes
from tests.plans import plan_file

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

HOME_S, AWAY_S = 3.0, 30.0
"""Home is slow, and what computes remotely is slower: what lies there is worth its way."""
FASTER_HOME_S = 0.15
"""A home that computes 9,000 tokens in 3 s: slower than the link usually is, and sooner than the
link once that has become slow. A pull is left before its timeout of 10 s."""
LONG = 9000
ATTEMPTS_MAX = 5
END = " And then?"
Answer = dict[str, Any]
Record = dict[str, Any]
SLOW_BYTES_PER_S = 100_000


@asynccontextmanager
async def pulling(live: Live, directory: Path, local_path_s: float = HOME_S) -> AsyncIterator[Live]:
    """A deployment whose gateway pulls and offloads nothing."""
    plan = plan_file(directory, local_s=local_path_s, remote_s=AWAY_S)
    routing = RoutingTable(offload_threshold=100_000, plan=plan, pull=True)
    deployment = live.topology.deployment.model_copy(update={"routing": routing})
    async with gateway_over(live, deployment) as (_, other):
        yield other


async def held_remote(live: Live, text: str) -> int:
    """Have the PrfaaS engine compute a chat for the gateway's clients, and nobody else hear of it.

    Returns:
        The prefix of it that is there for others, tokens.
    """
    salt = salt_of(deployment_secret(live.topology.deployment.state), DEFAULT_NAME)
    url = f"{live.topology.engines['prfaas-engine']}/v1/chat/completions"
    body = live.chat_body(text, cache_salt=salt, max_tokens=1)
    async with live.http.post(url, json=body) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
    num_tokens = int((answer["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    async def is_known() -> bool:
        found = await live.look(text)
        assert found["pd-pool"]["hit_tokens"] == found["pd-engine"]["hit_tokens"] == 0
        return bool(found["prfaas-pool"]["hit_tokens"] == num_tokens)

    await until(is_known)
    return num_tokens


async def counts(live: Live) -> Mapping[str, float]:
    """Counters of computed, found and pulled tokens, and of whole pulls."""
    engines, local = live.topology.engines, live.pool_admin("pd-pool")
    external = "vllm:external_prefix_cache_hits_total"
    found = {
        "computed away": await live.metric(engines["prfaas-engine"], "vllm:prompt_tokens_total"),
        "found at home": await live.metric(engines["pd-engine"], external),
        "pulled": await live.metric(live.url, "prfaas_pulled_tokens_total"),
        "whole": await live.metric(live.url, "prfaas_pulls_total", outcome="whole"),
    }
    loaded = "prfaas_pool_blocks_loaded_total"
    groups = {
        g: await live.metric(local, loaded, group=g) for g in (*LINEAR_GROUPS, ATTENTION_GROUP)
    }
    return found | groups


async def test_the_prefix_comes_and_the_words_are_the_same(live: Live, tmp_path: Path) -> None:
    known = "[pulled] " + document(4000, start=900)
    async with pulling(live, tmp_path) as other:
        num_tokens = await held_remote(other, known)
        assert num_tokens == 10 * BLOCK_TOKENS
        text = known[: num_tokens + 100] + document(1000, start=6000)
        before = await counts(other)
        answer, headers = await other.chat(text)
        record = await other.record(headers["X-Request-Id"])
        after = await counts(other)

        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["pull_tokens"], record["pulled_tokens"]) == (num_tokens, num_tokens)
        assert (record["source_pool"], record["destination_pool"]) == ("prfaas-pool", "pd-pool")
        assert record["transfer_state"] == "committed"
        assert record["kv_bytes"] == planned_bytes(live, num_tokens + 1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_tokens
        assert {name: after[name] - before[name] for name in after} == {
            "computed away": 0,
            "found at home": num_tokens,
            "pulled": num_tokens,
            "whole": 1,
            ATTENTION_GROUP: num_tokens // BLOCK_TOKENS,
            **dict.fromkeys(LINEAR_GROUPS, 1),
        }
        assert answer["choices"][0]["message"]["content"] == await live.alone(text, "pulled")


async def asked_slowly(live: Live, other: Live, known: str) -> tuple[Answer, Record, int]:
    """Have a chat begin with what only the PrfaaS pool holds, over a link that has become slow.

    Returns:
        Its answer, its record, and the prefix that is held away, tokens.
    """
    num_tokens = await held_remote(other, known)
    live.relay.bytes_per_s = SLOW_BYTES_PER_S
    try:
        answer, headers = await other.chat(known + END)
    finally:
        live.relay.bytes_per_s = 0
    return answer, await other.record(headers["X-Request-Id"]), num_tokens


async def test_a_prefix_that_is_late_is_computed(live: Live, tmp_path: Path) -> None:
    async with pulling(live, tmp_path, FASTER_HOME_S) as other:
        for number in range(ATTEMPTS_MAX):
            known = f"[late {number}] " + document(LONG)
            answer, record, num_tokens = await asked_slowly(live, other, known)
            if record["pull_tokens"]:
                break
            # What was measured of the link last, on a busy machine, can make it look too slow.
            await live.remote_again(f"measured {number}")
        assert (record["path"], record["pull_tokens"]) == ("local", num_tokens), record
        assert record["fallback"] == {"stage": "pull", "reason": "late"}
        # Without the state at its end nothing of it is of use.
        assert record["kv_bytes"] < planned_bytes(live, num_tokens + 1)
        assert record["pulled_tokens"] == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert await other.metric(other.url, "prfaas_pulls_total", outcome="late") == 1
        assert answer["choices"][0]["message"]["content"] == await live.alone(known + END, "late")

    async def is_let_go() -> bool:
        names = ("prfaas_open_transfers", "prfaas_pool_leased_blocks", "prfaas_pool_pinned_blocks")
        pools = [live.pool_admin(pool) for pool in ("prfaas-pool", "pd-pool")]
        return not any([await live.metric(url, name) for url in pools for name in names])

    await until(is_let_go)
    await live.remote_again("late")
