"""Input of clients creates no series of metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prfaas.gateway.tenancy.tenants import key_hash
from tests.gateway.conftest import World, running

_KEY = "sk-operators-key-of-this-test-000000000000"


async def strange_requests(world: World, mark: str) -> None:
    """Every place of a request that holds a name, with one that nobody knows."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "hi", "model": mark},
        {"prompt": "hi", "user": mark, "metadata": {mark: mark}},
        {"prompt": "hi", mark: mark},
        {"prompt": mark * 600},
        {"prompt": "hi", "stop": mark, "service_tier": mark, "prompt_cache_key": mark},
    ]
    headers = {
        "X-Request-Id": mark,
        "X-Tenant": mark,
        "User-Agent": mark,
        "traceparent": mark,
        "X-Request-Timeout": mark,
    }
    for body in bodies:
        await world.post(body)
        async with world.http.post(
            f"{world.url}/v1/completions", json=body, headers=headers
        ) as reply:
            await reply.read()
    for method, path in (
        ("GET", f"/{mark}"),
        ("GET", f"/v1/models/{mark}"),
        ("GET", f"/control/requests/{mark}"),
        ("POST", f"/control/engines/{mark}"),
        (mark.upper(), "/v1/models"),
    ):
        async with world.http.request(method, world.url + path, json={"x": mark}) as reply:
            await reply.read()


async def series(world: World) -> set[str]:
    async with world.http.get(f"{world.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return {re.split(r" [^ ]*$", line)[0] for line in lines if not line.startswith("#")}


async def test_names_of_clients_make_no_series(world: World) -> None:
    await strange_requests(world, "first")
    before = await series(world)
    for mark in ("second", "third"):
        await strange_requests(world, mark)
    assert await series(world) == before
    assert not [line for line in before if "first" in line.partition("{")[2]]


async def test_keys_of_nobody_make_no_series(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = {
        "gateway": {"operator_keys": [key_hash(_KEY)]},
        "tenants": {"known": {"keys": [key_hash("sk-known" * 5)]}},
    }
    async with running(checkpoint, identities, tmp_path, **tables) as world:
        counts = []
        for mark in ("one", "two"):
            for number in range(5):
                bearer = {"Authorization": f"Bearer {mark}-{number}"}
                async with world.http.post(
                    f"{world.url}/v1/completions", json={"prompt": "hi"}, headers=bearer
                ) as reply:
                    assert reply.status == 401
            operator = {"Authorization": f"Bearer {_KEY}"}
            async with world.http.get(f"{world.url}/metrics", headers=operator) as reply:
                counts.append(len((await reply.text()).splitlines()))
        assert counts[0] == counts[1]
