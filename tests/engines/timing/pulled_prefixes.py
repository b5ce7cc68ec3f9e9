"""Prompts whose prefix is pulled, and what is left of a pull."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME

from .deployment import World, running
from .worlds import PLAN, write_plan

KNOWN = list(range(177))
"""Its blocks reach to 176 tokens."""


PROMPT = KNOWN + [7] * 13


SPLIT = {"pd-0": "prefill", "pd-1": "decode"}


@asynccontextmanager
async def pulling(
    checkpoint: Path,
    identities: Path,
    directory: Path,
    roles: Mapping[str, str] = MappingProxyType({}),
    plan_text: str = PLAN,
    **routing: int,
) -> AsyncIterator[World]:
    """Two clusters; that of PrfaaS has computed `KNOWN` for somebody else."""
    plan = str(write_plan(directory, plan_text))
    table = {"offload_threshold": 200, "plan": plan, "pull": True, **routing}
    async with running(
        directory,
        checkpoint,
        identities,
        roles=roles,
        has_wire=True,
        plan_text=plan_text,
        routing=table,
    ) as world:
        salt = salt_of(deployment_secret(directory / "state"), DEFAULT_NAME)
        url = world.gateway.engines.by_name["prfaas-0"].url
        body = {"prompt": KNOWN, "cache_salt": salt, "max_tokens": 1, "temperature": 0}
        async with world.http.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.status == 200
        while await num_to_pull(world) != 176:  # noqa: ASYNC110 - an index signals nothing
            await asyncio.sleep(0.01)
        yield world


async def num_to_pull(world: World) -> int:
    """Tokens of the prompt that the gateway would pull."""
    async with world.http.post(f"{world.url}/kv/lookup", json={"prompt": PROMPT}) as reply:
        return int((await reply.json())["decision"]["pull_tokens"])


async def outcomes(world: World) -> dict[str, float]:
    """Outcomes of pulls."""
    found = {}
    for family in world.gateway.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "prfaas_pulls_total":
                found[sample.labels["outcome"]] = sample.value
    return found


def check_nothing_is_held(world: World) -> None:
    dispatcher = world.gateway.driver.dispatcher
    assert (len(dispatcher.requests), dispatcher.promised_bytes) == (0, 0)
    for site in world.sites.values():
        site.check()
