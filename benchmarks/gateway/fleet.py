"""A gateway with the members of a large fleet and no traffic: time to ready, CPU, memory, p99.

    python -m benchmarks.gateway.fleet [--engines 2000] [--hosts 250] [--seconds 20]

A second process has the engines (HTTP: health, models, metrics) and pool nodes (TLS, with links and
layouts), so that the figures are those of the gateway's process alone. A fifth of the hosts is a
PrfaaS site. Members come from a source that lists them all at once, then changes one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from aiohttp import web

from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.cli.parts.without_torch import keep_torch_out
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.core.dispatch.types import Arrival
from prfaas.core.membership.machine import Membership
from prfaas.core.membership.members import Listed, Member, MemberKind, Site, State
from prfaas.gateway.app import Gateway
from prfaas.wire.channel import Channel, keep_alive
from prfaas.wire.frames import Frame
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.codec import decode
from prfaas.wire.messages.gateway import PoolState, SnapshotEnd, Subscribe
from prfaas.wire.messages.layouts import layout_spec

from .decide import LAYOUT, percentiles

MODEL, AWAY_SHARE, DECISIONS, CHANGES = "fleet-timing", 5, 2000, 200
LOOPBACK = "127.0.0.1"


def hosts_of(num_engines: int, num_hosts: int) -> dict[str, list[str]]:
    """Engines by pool node; pool nodes of the PrfaaS site begin with "far"."""
    found: dict[str, list[str]] = {}
    for number in range(num_engines):
        host = number % num_hosts
        site = "far" if host % AWAY_SHARE == 0 else "pd"
        found.setdefault(f"{site}-pool-{host}", []).append(f"{site}-engine-{number}")
    return found


class Parts:
    """Engines and pool nodes without anything behind them."""

    def __init__(self, hosts: dict[str, list[str]], identities: Path) -> None:
        self._hosts, self._identities = hosts, identities
        self.places: dict[str, str] = {}

    async def open(self) -> None:
        app = web.Application()
        cards = {"data": [{"id": MODEL, "max_model_len": 1 << 20}]}
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", lambda _: _reply(web.json_response(cards)))
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        loop = asyncio.get_running_loop()
        assert runner.server is not None
        for pool, engines in self._hosts.items():
            tls = identity_in(self._identities, pool).server_context()
            server = await loop.create_server(partial(self._pool, pool), LOOPBACK, 0, ssl=tls)
            self.places[pool] = f"{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
            for engine in engines:
                server = await loop.create_server(runner.server, LOOPBACK, 0)
                self.places[engine] = f"http://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{MODEL}"'
        return web.Response(
            text=f"vllm:num_requests_running{{{labels}}} 0.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
        )

    def _pool(self, pool: str) -> Channel:
        targets = [name for name in self._hosts if name != pool and name.startswith("pd-")]
        layouts = {engine: layout_spec(LAYOUT) for engine in self._hosts[pool]}
        tasks: list[asyncio.Task[None]] = []

        def on_frame(channel: Channel, frame: Frame) -> None:
            if isinstance(decode(frame.payload), Subscribe):
                channel.send(SnapshotEnd(epoch="e", next_seq=0))
                channel.send(PoolState(0, layouts, dict.fromkeys(targets, True)))

        def closed(_: Channel, __: str) -> None:
            for task in tasks:
                task.cancel()

        return Channel(
            on_frame,
            closed,
            lambda channel: tasks.append(asyncio.create_task(keep_alive(channel))),
        )


async def _reply(response: web.Response) -> web.Response:
    return response


async def serve(num_engines: int, num_hosts: int, identities: Path) -> None:
    """The second process: open everything, print where it is, and wait for the end of the input."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    parts = Parts(hosts_of(num_engines, num_hosts), identities)
    await parts.open()
    print(json.dumps(parts.places), flush=True)
    await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def opened(num_engines: int, num_hosts: int, local: Path) -> AsyncIterator[dict[str, str]]:
    """Run the second process; yield the addresses of its parts."""
    command = ["-m", "benchmarks.gateway.fleet", "--serve", str(local)]
    command += ["--engines", str(num_engines), "--hosts", str(num_hosts)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=pipe, stdout=pipe, limit=1 << 24
    )
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.kill()
        await process.wait()


def members_of(hosts: dict[str, list[str]], places: dict[str, str]) -> list[Listed]:
    found = []
    for pool, engines in hosts.items():
        cluster = pool.partition("-")[0]
        found.append(Listed(Member(pool, MemberKind.POOL, cluster, places[pool])))
        found += [
            Listed(Member(name, MemberKind.ENGINE, cluster, places[name], pool, "both", MODEL))
            for name in engines
        ]
    return found


def deployment(local: Path) -> Deployment:
    # In a process of its own: it loads torch, which no gateway does.
    make = [sys.executable, "-W", "ignore", "-m", "prfaas.engines.checkpoint", "--tokenizer-only"]
    subprocess.run([*make, str(local / "model")], check=True, timeout=300)
    return Deployment.model_validate(
        {
            "model": {"name": MODEL, "path": str(local / "model")},
            "gateway": {"listen": f"{LOOPBACK}:0", "connect_timeout": "20s"},
            "routing": {"offload_threshold": 8000},
            "security": {"identities": str(local)},
            "membership": {"folder": str(local)},
            "state": str(local / "state"),
            "clusters": {"pd": {"role": "pd"}, "far": {"role": "prfaas"}},
        }
    )


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def until(condition: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    began_s = time.monotonic()
    while not condition():  # noqa: ASYNC110 - nobody signals it
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


def decide(gateway: Gateway) -> str:
    """Percentiles of decisions on prompts without cached blocks, CPU time."""
    driver, draw, times = gateway.driver, random.Random(1), []
    gc.collect()
    gc.freeze()
    for number in range(DECISIONS):
        length = draw.choice((2_000, 32_769))
        arrival = Arrival(
            -1 - number,
            length,
            length,
            shippable_tokens=LAYOUT.last_boundary(length),
            layout=LAYOUT,
        )
        began_ns = time.thread_time_ns()
        driver.route(arrival, time.monotonic_ns())
        times.append(time.thread_time_ns() - began_ns)
        driver.end(-1 - number, time.monotonic_ns())
    return percentiles(times)


async def change(gateway: Gateway, entries: list[Listed]) -> list[int]:
    """CPU time of the machine for one engine that is not ready, and then is again, ns."""
    draw, times = random.Random(2), []
    at = [index for index, each in enumerate(entries) if each.member.kind is MemberKind.ENGINE]
    for _ in range(CHANGES):
        index = draw.choice(at)
        for is_ready in (False, True):
            now = [*entries]
            now[index] = Listed(entries[index].member, is_ready=is_ready)
            began_ns = time.thread_time_ns()
            gateway.members.listed("fleet", now)
            times.append(time.thread_time_ns() - began_ns)
        entries = now
        await asyncio.sleep(0)
    return times


def machine(num_engines: int, num_hosts: int) -> None:
    """CPU time of the membership machine alone: the first list, then changes of one engine."""
    hosts = hosts_of(num_engines, num_hosts)
    names = [*hosts, *(name for names in hosts.values() for name in names)]
    places = {
        name: f"{'' if name in hosts else 'http://'}{LOOPBACK}:{port}"
        for port, name in enumerate(names, 1)
    }
    entries, draw, times = members_of(hosts, places), random.Random(1), []
    found = Membership(Site({"pd": ("both",), "far": ("both",)}, MODEL))
    began_ns = time.thread_time_ns()
    found.listed("fleet", entries, 1)
    first_ms = (time.thread_time_ns() - began_ns) / 1e6
    at = [index for index, each in enumerate(entries) if each.member.kind is MemberKind.ENGINE]
    for _ in range(CHANGES):
        changed, index = [*entries], draw.choice(at)
        changed[index] = Listed(entries[index].member, is_ready=False)
        for listed in (changed, entries):
            began_ns = time.thread_time_ns()
            found.listed("fleet", listed, 2)
            times.append(time.thread_time_ns() - began_ns)
    print(f"machine alone: first list {first_ms:.1f} ms")
    print(f"machine alone: change  {percentiles(times)}", flush=True)


async def measure(num_engines: int, num_hosts: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    keep_torch_out()
    hosts = hosts_of(num_engines, num_hosts)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder)
        make_authority(local)
        for name in ("gateway", *hosts):
            make_identity(local, name)
        file = deployment(local)
        async with opened(num_engines, num_hosts, local) as places:
            gateway = make_gateway(file, Endpoints({}, {}))
            await gateway.start()
            empty_mib, entries = resident_mib(), members_of(hosts, places)
            began_ns = time.thread_time_ns()
            gateway.members.listed("fleet", entries)
            listed_ns = time.thread_time_ns() - began_ns
            engines = [name for names in hosts.values() for name in names]
            state_of = gateway.members.machine.state_of
            ready_s = await until(lambda: all(state_of(n) is State.READY for n in engines))
            pools_s = await until(lambda: all(gateway.pools.is_live(pool) for pool in hosts))
            ready_mib, cpu_s = resident_mib(), time.process_time()
            await asyncio.sleep(seconds)
            cpu_s = (time.process_time() - cpu_s) / seconds
            took = await change(gateway, entries)
            print(
                f"{num_engines} engines on {num_hosts} hosts, {len(gateway.driver.links())} links"
            )
            print(f"list of all applied in {listed_ns / 1e9:.2f} s of CPU time")
            print(f"all engines ready after {ready_s:.1f} s, all pool nodes {pools_s:.1f} s later")
            print(f"memory {empty_mib:.0f} MiB without members, {ready_mib:.0f} MiB with them")
            print(f"CPU without traffic {cpu_s:.2f} s a second")
            print(f"change of one engine  {percentiles(took)}")
            print(f"decision              {decide(gateway)}")
            await gateway.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=2000)
    parser.add_argument("--hosts", type=int, default=250)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.engines, given.hosts, given.serve))
    else:
        machine(given.engines, given.hosts)
        asyncio.run(measure(given.engines, given.hosts, given.seconds))
