"""Compared systems: our gateway, other routers, and a straight connection to an engine."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import aiohttp

from prfaas.cli.deploy.topology import Topology, parts
from tests.deployments import laid_out, started
from tests.ports import free_port

from .prompts import ROOT

MODEL = "timing-bench"
ROUTER_CORE, OTHER_CORE = 0, 1
READY_S = 60
BLOCK_TOKENS = 2048
FILE = """
state = "{local}/state"

[model]
name = "{model}"
path = "{local}/model"

[gateway]
listen = "127.0.0.1:0"
workers = {workers}
requests_max = 20000

[routing]
offload_threshold = 1000000

[security]
identities = "{local}/identities"
generate = true

[clusters.prfaas]
role = "prfaas"

[clusters.prfaas.pools.prfaas-pool]
memory = "64MiB"

[clusters.prfaas.engines.prfaas-0]
pool = "prfaas-pool"
{prfaas}

[clusters.pd]
role = "pd"

[clusters.pd.pools.pd-pool]
memory = "256MiB"

[clusters.pd.engines.pd-0]
pool = "pd-pool"
{pd_0}

[clusters.pd.engines.pd-1]
pool = "pd-pool"
{pd_1}
"""
TIMING = """
[clusters.{cluster}.timing]
plan = "{root}/examples/plan/paper-case-study.toml"
time_scale = 1e-6
bytes_scale = 1e-6
block_tokens = {block_tokens}
cache_tokens = 100000
max_model_len = 262144
one_process = true
"""


@dataclass
class System:
    """Something that takes requests.

    Attributes:
        name: For the table.
        port: Where it listens.
        pids: Its processes; empty for the engine itself.
        own_engines: Whether it stands before engines of its own.
    """

    name: str
    port: int
    pids: list[int] = field(default_factory=list)
    own_engines: bool = False

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        total = 0
        for pid in self.pids:
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
            total += int(pages) * os.sysconf("SC_PAGESIZE")
        return total


@dataclass
class Ours:
    """A deployment of ours.

    Attributes:
        system: Its gateway.
        engines: Where each PD engine publishes KV events, which this gateway does not hear, by
            base URL.
    """

    system: System
    engines: dict[str, str]


async def laid(
    local: Path, events: Mapping[str, str], engine_url: str = "", workers: int = 1
) -> Topology:
    """A deployment that can be started, with engines of its own unless there is a URL."""
    file = local / "bench.toml"
    url, timing = f'url = "{engine_url}"' if engine_url else "", ""
    tables = dict.fromkeys(("prfaas", "pd_0", "pd_1"), url)
    if not engine_url:
        for name, where in events.items():
            tables[name.replace("-", "_")] = f'args = ["--kv-events", "{name}={where}"]'
        names = ("prfaas", "pd")
        timing = "".join(
            TIMING.format(cluster=name, root=ROOT, block_tokens=BLOCK_TOKENS) for name in names
        )
    tables["workers"] = str(workers)
    file.write_text(FILE.format(local=local, model=MODEL, **tables) + timing)
    return await laid_out(file)


@asynccontextmanager
async def deployment(
    local: Path, engine_url: str = "", workers: int = 1, *, is_pinned: bool = True
) -> AsyncIterator[Ours]:
    """Our gateway, its pool nodes and timing engines, or engines that run elsewhere."""
    events = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("pd-0", "pd-1")}
    topology = await laid(local, events, engine_url, workers)
    async with started(parts(topology)) as supervisor:
        pids = {part.name: part.process.pid for part in supervisor.parts if part.process}
        for name, pid in pids.items():
            if name != "gateway" or is_pinned:
                pin(pid, ROUTER_CORE if name == "gateway" else OTHER_CORE)
        engines = {topology.engines[name]: where for name, where in events.items()}
        gateway = pids["gateway"]
        yield Ours(System("prfaas", topology.gateway[1], [gateway, *children(gateway)]), engines)


@asynccontextmanager
async def process(
    core: int, *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> AsyncIterator[int]:
    """A process on one core, in a group of its own that ends with it.

    Yields:
        Its id.
    """
    begun = await asyncio.create_subprocess_exec(
        *("taskset", "-c", str(core), *command),
        stdout=DEVNULL,
        stderr=DEVNULL,
        cwd=cwd,
        env=os.environ | (env or {}),
        start_new_session=True,
    )
    try:
        yield begun.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(begun.pid, SIGKILL)
        await begun.wait()


@asynccontextmanager
async def bare_engine(*what: str) -> AsyncIterator[str]:
    """An engine without a model (`held.py`)."""
    port = free_port()
    command = (sys.executable, "-m", "benchmarks.gateway.held", str(port), MODEL, *what)
    async with process(OTHER_CORE, *command):
        await answers(port)
        yield f"http://127.0.0.1:{port}"


def children(pid: int) -> list[int]:
    """Processes that a process's first thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process on one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


async def answers(port: int) -> None:
    """Wait until there is a model behind a port."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
        while True:
            try:
                async with http.get(f"http://127.0.0.1:{port}/v1/models") as reply:
                    if reply.status == 200 and (await reply.json(content_type=None))["data"]:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
