"""Ranks of operators: a key that scrapes metrics changes nothing, on no route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prfaas.gateway.api.auth import CLIENT_PATHS, CLIENT_PREFIX, OPEN_PATHS, QUESTIONS
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.gateway.conftest import World, running

RANKS = ("metrics", "view", "change")
KEYS = {rank: new_key() for rank in RANKS}
UNNAMED = new_key()


@pytest.fixture
async def ranked(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    operators = {rank: {"keys": [key_hash(KEYS[rank])], "rank": rank} for rank in RANKS}
    tables: dict[str, Any] = {
        "operators": operators,
        "gateway": {"operator_keys": [key_hash(UNNAMED)]},
    }
    async with running(checkpoint, identities, tmp_path / "state", **tables) as world:
        yield world


async def status(world: World, method: str, path: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    url = world.url + path
    async with world.http.request(method, url, headers=headers, json={}) as reply:
        return reply.status


def routes(world: World) -> list[tuple[str, str]]:
    """Method and path of each route of operators."""
    app = world.gateway._app()
    found = [
        (route.method, route.resource.canonical.replace("{name}", "prefill"))
        for route in app.router.routes()
        if route.resource is not None
    ]
    return [
        (method, path)
        for method, path in found
        if path not in OPEN_PATHS | CLIENT_PATHS and not path.startswith(CLIENT_PREFIX)
    ]


async def test_each_route_needs_the_rank_for_what_it_does(ranked: World) -> None:
    opened: dict[str, set[tuple[str, str]]] = {rank: set() for rank in RANKS}
    for method, path in routes(ranked):
        if "{" in path or path.endswith("/events"):  # A stream has no end.
            continue
        for rank in RANKS:
            code = await status(ranked, method, path, KEYS[rank])
            assert code != 401, (method, path)
            if code != 403:
                opened[rank].add((method, path))
    assert opened["metrics"] == {("GET", "/metrics"), ("HEAD", "/metrics")}
    changes = opened["change"] - opened["view"]
    assert {("POST", "/control/purge"), ("POST", "/control/prefixes")} <= changes
    assert {method for method, _ in changes} == {"POST"}
    posts = {path for method, path in opened["view"] if method == "POST"}
    assert posts == QUESTIONS


async def test_a_key_for_metrics_purges_nothing_and_sees_no_details(ranked: World) -> None:
    body = {"source": "prfaas-pool", "dry_run": True}
    for rank, expected in (("metrics", 403), ("view", 403), ("change", 200)):
        headers = {"Authorization": f"Bearer {KEYS[rank]}"}
        url = f"{ranked.url}/control/purge"
        async with ranked.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == expected, rank
            assert expected == 200 or "rank 'change'" in await reply.text()
    assert await status(ranked, "GET", "/control/status", KEYS["metrics"]) == 403
    assert await status(ranked, "GET", "/control/status", UNNAMED) == 200
