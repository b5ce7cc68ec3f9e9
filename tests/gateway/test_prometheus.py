"""Debian's Prometheus scrapes a gateway and a pool node, and evaluates our rules and panels."""

from __future__ import annotations

import asyncio
import re
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.pool.conftest import World as Pools
from tests.pool.conftest import world as pools_world

from .alert_rules import RULES, expressions
from .conftest import World
from .prompts import LONG, SHORT

pools = pools_world
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="Debian's prometheus package is not installed",
    ),
    # Three scrapes, and all the rules once, on a machine that may be busy.
    pytest.mark.timeout(180),
]
LOOK_S = 0.05


@asynccontextmanager
async def prometheus(directory: Path, targets: dict[str, str]) -> AsyncIterator[str]:
    """A Prometheus that scrapes `HOST:PORT` by job; its base URL."""
    config = directory / "prometheus.yml"
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [target]}]}
        for job, target in targets.items()
    ]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config.write_text(
        yaml.safe_dump({"global": every, "rule_files": [str(RULES)], "scrape_configs": jobs})
    )
    process = await asyncio.create_subprocess_exec(
        str(shutil.which("prometheus")),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=PIPE,
        limit=1 << 20,
    )
    try:
        yield await listening(process)
    finally:
        process.terminate()
        await process.communicate()


async def listening(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = ""
    while line := (await process.stderr.readline()).decode():
        said += line
        found = re.search(r'msg="Listening on" address=(127\.0\.0\.1:[1-9]\d*)', line)
        if found:
            return f"http://{found[1]}"
    raise AssertionError(said)


async def is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    async with http.get(f"{url}/-/ready") as response:
        return response.status == 200


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until `condition` holds; the test's timeout is the limit."""
    while not await condition():  # noqa: ASYNC110 - Prometheus signals nobody
        await asyncio.sleep(LOOK_S)


async def asked(http: aiohttp.ClientSession, url: str, path: str, **query: str) -> dict[str, Any]:
    async with http.get(f"{url}/api/v1/{path}", params=query) as response:
        found: dict[str, Any] = await response.json()
        assert found["status"] == "success", found
        data: dict[str, Any] = found["data"]
        return data


async def test_prometheus_scrapes_and_evaluates(world: World, pools: Pools, tmp_path: Path) -> None:
    for prompt in (SHORT, LONG):
        await world.post({"prompt": prompt, "max_tokens": 2})
    prfaas, *_ = await pools.two_sites()
    targets = {
        "prfaas-gateway": world.url.removeprefix("http://"),
        "prfaas-pool": f"127.0.0.1:{prfaas.node.admin_port}",
    }
    async with prometheus(tmp_path, targets) as url, aiohttp.ClientSession() as http:

        async def value(query: str) -> float | None:
            result = (await asked(http, url, "query", query=query))["result"]
            return float(result[0]["value"][1]) if result else None

        async def has(query: str, expected: float) -> bool:
            return await value(query) == expected

        await until(lambda: is_ready(http, url))
        await until(lambda: has("sum(up)", len(targets)))
        await until(lambda: has('sum(prfaas_requests_total{outcome="finished"})', 2))
        assert await value('prfaas_link_up{job="prfaas-pool",peer="pd-pool"}') == 1
        assert await value("sum(prfaas_engine_ready)") == 2
        for _, expression in expressions():
            await asked(http, url, "query", query=expression.replace("$__rate_interval", "1m"))

        async def rules() -> list[dict[str, Any]]:
            groups = (await asked(http, url, "rules"))["groups"]
            return [rule for group in groups for rule in group["rules"]]

        async def are_evaluated() -> bool:
            return all(rule["health"] != "unknown" for rule in await rules())

        await until(are_evaluated)
        assert {rule["health"] for rule in await rules()} == {"ok"}
        assert len(await rules()) == len(yaml.safe_load(RULES.read_text())["groups"][0]["rules"])


async def test_promtool_takes_the_rules() -> None:
    tool = str(shutil.which("promtool"))
    process = await asyncio.create_subprocess_exec(
        tool, "check", "rules", str(RULES), stdout=PIPE, stderr=PIPE
    )
    said = await process.communicate()
    assert process.returncode == 0, said
