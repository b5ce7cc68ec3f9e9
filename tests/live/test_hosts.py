"""One PD cluster of two hosts with real engines: prefill on one and decode on the other, and a
prefix of one that the other one hits.

The engines and pool nodes are those of the two clusters; this gateway takes them for two hosts of
one. The link leads from the first host to the second, which is all that these tests need.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prfaas.config.clusters import EngineRole
from prfaas.config.deployment import Deployment
from prfaas.gateway.app import Gateway
from tests.live.conftest import Live, document, gateway_over, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
]
LINK = ("prfaas-pool", "pd-pool")
BOTH = (EngineRole.BOTH, EngineRole.BOTH)
APART = (EngineRole.PREFILL, EngineRole.DECODE)


def one_site(deployment: Deployment, roles: tuple[EngineRole, EngineRole]) -> Deployment:
    """The parts of both clusters as two hosts of one."""
    first, second = deployment.clusters["prfaas"], deployment.clusters["pd"]
    found = {**first.engines, **second.engines}
    engines = {
        name: engine.model_copy(update={"role": role, "kv_events": None, "kv_events_replay": None})
        for (name, engine), role in zip(found.items(), roles, strict=True)
    }
    site = second.model_copy(
        update={"pools": {**first.pools, **second.pools}, "engines": engines},
    )
    return deployment.model_copy(update={"clusters": {"pd": site}})


@asynccontextmanager
async def as_one_site(
    live: Live, roles: tuple[EngineRole, EngineRole]
) -> AsyncIterator[tuple[Gateway, Live]]:
    """A gateway that takes what runs for one cluster, once it sees all of it."""
    async with gateway_over(live, one_site(live.topology.deployment, roles)) as found:
        yield found


@pytest.mark.parametrize("num_chars", [3000, 8000])
async def test_one_host_prefills_and_another_one_decodes_the_same_tokens(
    live: Live, num_chars: int
) -> None:
    text = f"[hosts {num_chars}] " + document(num_chars)
    async with as_one_site(live, APART) as (_, site):
        answer, headers = await site.chat(text)
        record = await site.record(headers["X-Request-Id"])
    assert (record["path"], record["fallback"]) == ("local", None)
    assert (record["prefill_engine"], record["decode_engine"]) == ("prfaas-engine", "pd-engine")
    assert (record["source_pool"], record["destination_pool"]) == LINK
    assert record["transfer_state"] == "committed"
    assert record["kv_bytes"] > 0
    expected = await live.alone(text, f"hosts {num_chars}")
    assert answer["choices"][0]["message"]["content"] == expected


async def test_a_prefix_of_one_host_is_a_hit_on_the_other_one(live: Live) -> None:
    text = "[hosts hit] " + document(6000)
    async with as_one_site(live, BOTH) as (gateway, site):
        answers = []
        for engine, other in (("prfaas-engine", "pd-engine"), ("pd-engine", "prfaas-engine")):
            for name, drained in ((engine, False), (other, True)):
                gateway.driver.set_drained(name, time.monotonic_ns(), drained=drained)
            answer, headers = await site.chat(text)
            record = await site.record(headers["X-Request-Id"])
            assert (record["decode_engine"], record["fallback"]) == (engine, None)
            answers.append(answer["choices"][0]["message"]["content"])

            async def is_stored() -> bool:
                return bool((await site.look(text))["prfaas-pool"]["hit_tokens"])

            await until(is_stored)
        assert record["pulled_tokens"] > 0
        assert (record["source_pool"], record["destination_pool"]) == LINK
        assert record["cached_tokens"] >= record["pulled_tokens"]
    assert answers[0] == answers[1] == await live.alone(text, "hosts hit")
