"""Two clusters of timing engines, two pool nodes, a wire to cut and two gateways: all processes."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from string import Template

import aiohttp

from prfaas.cli.deploy.topology import lay_out, parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.supervisor import Supervisor
from tests.deployments import laid_out, put_between, started
from tests.lab.faults import Fault, FaultProxy

PREFILL = ("prfaas-0", "prfaas-1")
DECODE = ("pd-0", "pd-1")
POOLS = ("prfaas-pool", "pd-pool")
MODEL = "timing-drill"
MAX_MODEL_LEN = 16384
SLOW_BITS_PER_S = 8_000_000
PROXY_BYTES = 16 << 10
HELD = ("pool_leased_blocks", "pool_pinned_blocks", "pool_promised_bytes", "open_transfers")

PLAN = """
title = "A drill: quick enough for two cores, slow enough to be hit"
[model]
name = "drill"
kv_bytes_per_token = "512B"
kv_state = "4KiB"
[workload]
distribution = "lengths"
lengths = [100, 8000]
output_tokens = 32
[[prfaas]]
name = "prfaas"
instances = $num_prefill
gpus_per_instance = 1
prefill = { source = "made up", lengths = [64, 8000], seconds = [$remote_s] }
link = { bandwidth = "1Gbps" }
[pd]
name = "pd"
instances = 2
gpus_per_instance = 1
prefill = { source = "made up", lengths = [64, 8000], seconds = [$local_s] }
decode = { source = "made up", batches = [1, 64], step = [["$step_ms"], ["$full_ms"]] }
[search]
chunk = 512
"""

DEPLOYMENT = """
state = "{local}/state"
[model]
name = "{model}"
path = "{local}/model"
generate = true
[gateway]
listen = "127.0.0.1:0"
[routing]
offload_threshold = 2000
policy = "paper"
plan = "{local}/plan.toml"
transfer_timeout = "5s"
[security]
identities = "{local}/state/identities"
generate = true
"""

CLUSTER = """
[clusters.{name}]
role = "{name}"
[clusters.{name}.timing]
plan = "{local}/plan.toml"
block_tokens = 64
max_model_len = {max_model_len}
[clusters.{name}.pools.{name}-pool]
memory = "512MiB"
"""

ENGINE = """
[clusters.{cluster}.engines.{name}]
pool = "{cluster}-pool"
host_memory = "32MiB"
"""


def plan_text(num_prefill: int = len(PREFILL), slower: float = 1.0) -> str:
    """The plan of engines that take `slower` times as long."""
    return Template(PLAN).substitute(
        num_prefill=num_prefill,
        remote_s=f"{0.005 * slower}, {0.3 * slower}",
        local_s=f"{0.006 * slower}, {0.4 * slower}",
        step_ms=f"{25 * slower:g}ms",
        full_ms=f"{30 * slower:g}ms",
    )


def write_files(local: Path, prefill: tuple[str, ...], slower: float = 1.0) -> Path:
    """The deployment file, and the plan that it names."""
    (local / "plan.toml").write_text(plan_text(len(prefill), slower))
    text = DEPLOYMENT.format(local=local, model=MODEL)
    for cluster, engines in (("prfaas", prefill), ("pd", DECODE)):
        text += CLUSTER.format(name=cluster, local=local, max_model_len=MAX_MODEL_LEN)
        text += "".join(ENGINE.format(cluster=cluster, name=name) for name in engines)
    file = local / "drill.toml"
    file.write_text(text)
    return file


class Site:
    """The running deployment, and what can be done to it.

    Args:
        supervisor: Has all its processes.
        gateways: Base URLs.
        wire: Between the pools.
        feeds: Between the first gateway and each pool.
        engines: Base URLs by name.
        model: Checkpoint directory.
        http: For questions.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        gateways: list[str],
        wire: FaultProxy,
        feeds: dict[str, FaultProxy],
        model: Path,
        http: aiohttp.ClientSession,
    ) -> None:
        self.slower = 1.0
        """Factor of the engines' times; the slowed link is as much slower."""
        self.supervisor, self.gateways, self.wire, self.feeds = supervisor, gateways, wire, feeds
        self.model, self.http = model, http

    def kill(self, name: str) -> None:
        """SIGKILL to a process and all it started."""
        self.supervisor.part(name).signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Let the first decode engine stand still, its connections open."""
        self.supervisor.part(DECODE[0]).signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.supervisor.part(DECODE[0]).signal(signal.SIGCONT)

    async def restart(self, name: str) -> None:
        """Start a process anew, and wait until it answers that it is well."""
        await self.supervisor.restart(name)

    async def stop(self, name: str) -> None:
        """SIGTERM, and wait until it has ended."""
        part = self.supervisor.part(name)
        part.terminate()
        while not part.has_ended():  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.05)

    def cut(self) -> None:
        """Reset the connections between the pools, and let no new one through."""
        self.wire.is_plugged = False
        self.wire.strike(Fault.RESET)

    def silence(self) -> None:
        """Drop all that is sent between the pools, and let no new connection through."""
        self.wire.is_plugged = False
        self.wire.strike(Fault.HALF_OPEN)

    def plug_in(self) -> None:
        """Let the pools connect again."""
        self.wire.is_plugged = True

    def slow(self) -> None:
        """Let the link between the pools carry far less than the plan says."""
        self.wire.link_bits_per_s = round(SLOW_BITS_PER_S / self.slower)

    def quicken(self) -> None:
        """Let them carry what they can."""
        self.wire.link_bits_per_s = 0

    def stall(self) -> None:
        """Deliver nothing more to the first gateway of what the pools tell."""
        for feed in self.feeds.values():
            feed.is_plugged = False
            feed.strike(Fault.HALF_OPEN)

    def flow(self) -> None:
        """Let the first gateway subscribe again."""
        for feed in self.feeds.values():
            feed.is_plugged = True

    async def is_whole(self) -> bool:
        """Return True if every gateway sees every part."""
        try:
            for url in self.gateways:
                async with self.http.get(f"{url}/health?full=1") as reply:
                    if reply.status != 200:
                        return False
        except aiohttp.ClientError:
            return False
        return True

    async def drain(self, engine: str, *, drained: bool) -> None:
        """Have every gateway give an engine nothing new, and wait until it has nothing."""
        for url in self.gateways:
            body = {"drained": drained}
            async with self.http.post(f"{url}/control/engines/{engine}", json=body) as reply:
                assert reply.status == 200, await reply.text()
        while drained and await self.num_in_flight(engine):  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.05)

    async def num_in_flight(self, engine: str) -> int:
        """Legs that gateways have on an engine."""
        total = 0
        for url in self.gateways:
            async with self.http.get(f"{url}/control/status") as reply:
                for one in (await reply.json())["engines"]:
                    total += one["num_in_flight"] if one["name"] == engine else 0
        return total

    async def held(self) -> dict[str, float]:
        """Memory that pool nodes hold for transfers; nothing is left after their end."""
        found: dict[str, float] = {}
        for pool in POOLS:
            page = await self._metrics(self.supervisor.part(pool).health_url)
            for name in HELD:
                samples = _samples(page, f"prfaas_{name}(?:{{.*}})?")
                assert samples, f"{pool} says nothing of {name}"
                found[f"{name} of {pool}"] = sum(samples)
        return found

    async def num_late(self) -> float:
        """Remote paths that gateways which answer have left for being late."""
        total = 0.0
        for url in self.gateways:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                page = await self._metrics(url)
                total += sum(_samples(page, 'prfaas_fallback_total{reason="late".*}'))
        return total

    async def _metrics(self, url: str) -> str:
        async with self.http.get(f"{url.removesuffix('/health')}/metrics") as reply:
            return await reply.text()

    async def records(self) -> dict[str, dict[str, object]]:
        """Records of the gateways, by request id."""
        found: dict[str, dict[str, object]] = {}
        for url in self.gateways:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self.http.get(f"{url}/control/requests?limit=1000") as reply:
                    for record in (await reply.json())["requests"]:
                        found[record["request_id"]] = record
        return found


@asynccontextmanager
async def running(
    local: Path, prefill: tuple[str, ...] = PREFILL, slower: float = 1.0
) -> AsyncIterator[Site]:
    """Start the deployment of two clusters, and stop it."""
    file, link = write_files(local, prefill, slower), ("prfaas-pool", "pd-pool")
    async with launched(file, link, PROXY_BYTES, has_feeds=True) as site:
        site.slower = slower
        yield site


@asynccontextmanager
async def launched(
    file: Path, link: tuple[str, str], buffer_bytes: int = 0, *, has_feeds: bool = False
) -> AsyncIterator[Site]:
    """Start the deployment of a file with a second gateway, and stop it.

    Args:
        file: The deployment file.
        link: Source and destination of the link that can be cut.
        buffer_bytes: Bytes of that link that its wire may hold; 0 is the choice of the system.
        has_feeds: Put a wire between the first gateway and each pool.
    """
    topology = await laid_out(file)
    source, destination = link
    wire = FaultProxy(topology.pools[destination], buffer_bytes=buffer_bytes)
    feeds = {pool: FaultProxy(address) for pool, address in topology.pools.items() if has_feeds}
    for proxy in (wire, *feeds.values()):
        await proxy.open()
    other = lay_out(topology.deployment, file)
    stages = parts(topology)
    [gateway] = [part for part in stages[1] if part.kind == "gateway"]
    stages[1].append(second_gateway(gateway, topology.gateway_url, other.gateway))
    put_between(stages, source, destination, wire.port)
    for pool, feed in feeds.items():
        host, port = topology.pools[pool]
        args = gateway.command.args
        args[args.index(f"{pool}={host}:{port}")] = f"{pool}=127.0.0.1:{feed.port}"
    urls, model = [topology.gateway_url, other.gateway_url], Path(topology.deployment.model.path)
    try:
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            yield Site(supervisor, urls, wire, feeds, model, http)
    finally:
        for proxy in (wire, *feeds.values()):
            await proxy.close()


def _samples(page: str, name: str) -> list[float]:
    """Values of a Prometheus page whose name and labels match."""
    return [float(value) for value in re.findall(rf"^{name} (\S+)$", page, re.MULTILINE)]


def second_gateway(first: ProcessPart, url: str, address: tuple[str, int]) -> ProcessPart:
    """Another replica of a gateway, at another address."""
    args = list(first.command.args)
    host, port = address
    args[args.index("--listen") + 1] = f"{host}:{port}"
    return dataclasses.replace(
        first,
        name=f"{first.name}-2",
        command=dataclasses.replace(first.command, args=args, env=dict(os.environ)),
        health_url=first.health_url.replace(url, f"http://{host}:{port}"),
        log=first.log.with_name("gateway-2.log"),
        leftovers=[],
    )
