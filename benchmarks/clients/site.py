"""Two sites of timing engines in network namespaces, with the WAN lab's link between them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.engines.checkpoint import make_checkpoint
from prfaas.lab.wan import Side, Wan
from prfaas.wire.identity import make_authority, make_identity

PLAN = Path(__file__).parents[2] / "examples" / "plan" / "paper-case-study.toml"
MODEL = "timing-clients"
GATEWAY = "127.0.0.1:8000"
NUM_ENGINES = 2
THRESHOLD = 2000
POOL_PORT, ADMIN_PORT, ENGINE_PORT = 7100, 7180, 8100
READY_S = 120.0
HELD = (
    "prfaas_requests_in_flight",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "prfaas_open_transfers",
    "prfaas_pool_pinned_blocks",
    "prfaas_pool_promised_bytes",
    "prfaas_link_unfinished_bytes",
)
"""Gauges of what requests hold: all zero once nobody is served."""


@dataclass
class Lab:
    """Both sites.

    Attributes:
        wan: The link.
        place: Folder of keys, sockets and logs.
    """

    wan: Wan
    place: Path

    @property
    def tokenizer(self) -> Path:
        """Where the model's tokenizer is."""
        return self.place / "tokenizer"

    async def metrics(self) -> dict[str, float]:
        """Sums of all samples of a name, over all parts."""
        sums: dict[str, float] = {}
        for side, url in self._pages():
            page = await self._get(side, url)
            for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", page, re.MULTILINE):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def held(self) -> dict[str, float]:
        """What of `HELD` is not zero."""
        found = await self.metrics()
        return {name: found[name] for name in HELD if found.get(name)}

    async def run(self, name: str, command: list[str], env: dict[str, str]) -> None:
        """Run a client at the PD site.

        Raises:
            SystemExit: It failed.
        """
        with (self.place / f"{name}.log").open("wb") as log:
            process = await self.wan.run(
                "b", command, stdout=log, stderr=log, cwd=self.place, env=env
            )
            if await process.wait():
                raise SystemExit(f"{name} ended with {process.returncode}: {log.name}")

    def _pages(self) -> list[tuple[Side, str]]:
        engines: list[tuple[Side, str]] = [
            (side, f"http://{self.wan.address(side)}:{ENGINE_PORT + i}")
            for side in ("a", "b")
            for i in range(NUM_ENGINES)
        ]
        pools: list[tuple[Side, str]] = [
            (side, f"http://127.0.0.1:{ADMIN_PORT}") for side in ("a", "b")
        ]
        return [("b", f"http://{GATEWAY}"), *engines, *pools]

    async def _get(self, side: Side, url: str) -> str:
        command = ["curl", "-s", "--fail", "--noproxy", "*", f"{url}/metrics"]
        process = await self.wan.run(side, command, stdout=asyncio.subprocess.PIPE)
        page, _ = await process.communicate()  # empty while nobody listens
        return page.decode()


@asynccontextmanager
async def lab(place: Path, rate: int, rtt_ms: float, time_scale: float) -> AsyncIterator[Lab]:
    """Both sites, ready."""
    make_checkpoint(place / "tokenizer", weights=False)
    make_authority(place)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(place, name)
    async with Wan(rtt_ms=rtt_ms, rate_bits_per_s=rate) as wan:
        made = Lab(wan, place)
        (place / "gateway.toml").write_text(_deployment(made))
        for side, cluster in (("b", "pd"), ("a", "prfaas")):
            await _start(made, side, f"{cluster}-pool", _pool(made, side, cluster))
            await _start(
                made, side, f"{cluster}-engines", _engines(made, side, cluster, time_scale)
            )
        await _start(made, "b", "gateway", ["gateway", str(place / "gateway.toml")])
        async with asyncio.timeout(READY_S):
            while not await _is_ready(made):  # noqa: ASYNC110 - they say it on pages only
                await asyncio.sleep(0.5)
        yield made


async def _is_ready(made: Lab) -> bool:
    found = await made.metrics()
    ready = found.get("prfaas_engine_ready") == 2 * NUM_ENGINES
    return ready and found.get("prfaas_link_up", 0) >= 1 and found.get("prfaas_index_blocks") == 0


async def _start(made: Lab, side: Side, name: str, arguments: list[str]) -> None:
    with (made.place / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-m", "prfaas", *arguments]
        await made.wan.run(side, command, stdout=log, stderr=log)


def _pool(made: Lab, side: Side, cluster: str) -> list[str]:
    address = f"{made.wan.address(side)}:{POOL_PORT}"
    arguments = ["pool", "--name", f"{cluster}-pool", "--memory", "512MiB", "--listen", address]
    arguments += ["--admin", f"127.0.0.1:{ADMIN_PORT}", "--gateway", "gateway"]
    arguments += ["--socket", f"{made.place}/{cluster}.sock", "--identities", str(made.place)]
    if cluster == "pd":
        return [*arguments, "--source", "prfaas-pool"]
    return [*arguments, "--peer", f"pd-pool={made.wan.address('b')}:{POOL_PORT}"]


def _engines(made: Lab, side: Side, cluster: str, time_scale: float) -> list[str]:
    arguments = ["engine", "timing", "--plan", str(PLAN), "--model", MODEL]
    arguments += ["--model-path", str(made.tokenizer), "--pool", f"{made.place}/{cluster}.sock"]
    arguments += ["--time-scale", str(time_scale), "--bytes-scale", "0.001"]
    arguments += ["--block-tokens", "64", "--cluster", "prfaas"][: 4 if cluster == "prfaas" else 2]
    for i in range(NUM_ENGINES):
        arguments += ["--engine", f"{cluster}-{i}={made.wan.address(side)}:{ENGINE_PORT + i}"]
    return arguments


def _deployment(made: Lab) -> str:
    text = f"""
state = "{made.place}/state"
[model]
name = "{MODEL}"
path = "{made.tokenizer}"
[gateway]
listen = "{GATEWAY}"
[routing]
offload_threshold = {THRESHOLD}
[security]
identities = "{made.place}"
"""
    for side, cluster in (("a", "prfaas"), ("b", "pd")):
        address = made.wan.address("a" if side == "a" else "b")
        text += f'[clusters.{cluster}]\nrole = "{cluster}"\n'
        text += f'[clusters.{cluster}.pools.{cluster}-pool]\naddress = "{address}:{POOL_PORT}"\n'
        for i in range(NUM_ENGINES):
            text += f'[clusters.{cluster}.engines.{cluster}-{i}]\npool = "{cluster}-pool"\n'
            text += f'url = "http://{address}:{ENGINE_PORT + i}"\n'
    return text
