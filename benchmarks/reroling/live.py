"""A day, live: two clusters of timing engines, two pool nodes and a gateway, all processes."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.solve.search import optimum
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.system.request import Request
from tests.deployments import laid_out, started

from .load import drive, prepare
from .outcome import PLAN, Change, Run, Settings

MODEL = "timing-day"
READY_S = 60.0
DEPLOYMENT = """
state = "{place}/state"
[model]
name = "{model}"
path = "{place}/tokenizer"
generate = true
[gateway]
listen = "127.0.0.1:0"
[routing]
offload_threshold = {threshold}
policy = "{policy}"
plan = "{plan}"
reroling = {reroling}
reroling_dwell = "{dwell}s"
[security]
identities = "{place}/identities"
generate = true
"""
CLUSTER = """
[clusters.{name}]
role = "{name}"
[clusters.{name}.timing]
plan = "{plan}"
block_tokens = 64
max_model_len = 8192
stream_interval = 8
one_process = true
[clusters.{name}.pools.{name}-pool]
memory = "256MiB"
"""
ENGINE = """
[clusters.{cluster}.engines.{name}]
pool = "{cluster}-pool"
host_memory = "16MiB"
"""


def deployment(settings: Settings, place: Path, *, reroling: bool) -> str:
    """The file: the threshold is the planner's for the whole day, and so are roles at first."""
    problem = load_question(PLAN).problem
    found = optimum(problem, StageMode.EXACT)
    text = DEPLOYMENT.format(
        place=place,
        model=MODEL,
        plan=PLAN,
        threshold=round(found.offload_threshold or 0),
        policy=settings.policy,
        reroling=str(reroling).lower(),
        dwell=settings.dwell_s,
    )
    num_prefill = settings.num_prefill or found.num_prefill
    remote = {f"prfaas-{i}": "both" for i in range(found.num_prfaas)}
    local = {
        f"pd-{i}": "prefill" if i < num_prefill else "decode"
        for i in range(problem.pd.num_instances)
    }
    for cluster, engines in (("prfaas", remote), ("pd", local)):
        text += CLUSTER.format(name=cluster, plan=PLAN)
        for name, role in engines.items():
            text += ENGINE.format(cluster=cluster, name=name) + f'role = "{role}"\n'
    return text


@asynccontextmanager
async def running(settings: Settings, place: Path, *, reroling: bool) -> AsyncIterator[Topology]:
    """Start the deployment, wait until the gateway sees all of it, and stop it.

    Args:
        settings: Of the run.
        place: Folder for keys, sockets and logs.
        reroling: Whether the long-term loop runs.
    """
    file = place / "day.toml"
    file.write_text(deployment(settings, place, reroling=reroling))
    topology = await laid_out(file)
    async with started(parts(topology)):
        await _whole(topology)
        yield topology


async def live(settings: Settings, asked: list[Request], place: Path, *, reroling: bool) -> Run:
    """Drive the deployment through the day.

    Args:
        settings: Of the run.
        asked: What comes when.
        place: Folder for keys, sockets and logs.
        reroling: Whether the long-term loop runs.
    """
    async with running(settings, place, reroling=reroling) as topology:
        path = str(topology.deployment.model.path)
        asks = await asyncio.to_thread(prepare, asked, MODEL, Vocabulary(path))
        start, start_unix, cpu = time.monotonic(), time.time(), _cpu()
        outcomes = await drive(topology.gateway_url, asks, start)
        cores = (_cpu() - cpu) / 100 / (time.monotonic() - start)
        changes = role_changes(await decisions(topology), start_unix)
        facts = {"busy cores": cores, "engines behind at most, s": await _behind(topology)}
    return Run("live", reroling, outcomes, changes, facts)


async def decisions(topology: Topology) -> list[dict[str, Any]]:
    """Decisions of the long-term loop, in order."""
    page = await _get(f"{topology.gateway_url}/control/decisions?limit=1000")
    return [entry for entry in reversed(page["decisions"]) if entry["loop"] == "roles"]


def role_changes(entries: list[dict[str, Any]], start_unix: float) -> list[Change]:
    """Engines that took another role, or still drain; a drain that was given up is none."""
    found: list[Change] = []
    for entry in entries:
        numbers = entry["numbers"]
        match entry["action"]:
            case "drains":
                at, left = entry["at_unix_s"] - start_unix, numbers["requests_left"]
                found.append(Change(at, entry["new"], math.nan, left))
            case "changed":
                found[-1] = replace(found[-1], drained_s=numbers["drained_s"])
            case "kept":
                found.pop()
    return found


async def _get(url: str) -> Any:
    async with aiohttp.ClientSession() as http, http.get(url) as reply:
        return await (reply.text() if url.endswith("/metrics") else reply.json())


async def _whole(topology: Topology) -> None:
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{topology.gateway_url}/health?full=1") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.2)


async def _behind(topology: Topology) -> float:
    """Largest delay of engines behind their profile, s."""
    pages = [await _get(f"{url}/metrics") for url in topology.engines.values()]
    found = re.findall(r"^timing:behind_profile_seconds\{.*\} (\S+)$", "\n".join(pages), re.M)
    return max(map(float, found))


def _cpu() -> int:
    """Hundredths of seconds that all cores together were busy so far."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4]
