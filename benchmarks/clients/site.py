"""Two sites of timing engines, and what clients and their metrics say of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.two_sites import AWAY, CLUSTERS, GATEWAY, HOME, TwoSites, prepare
from tests.lab.wan import Side, Wan

MODEL = "timing-clients"
NUM_ENGINES = 2
THRESHOLD = 2000
POOL_MEMORY, ADMIN_PORT = "512MiB", 7180
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


class Lab(TwoSites):
    """Both sites, and what they say of themselves."""

    async def metrics(self) -> dict[str, float]:
        """Sums of all samples of a name, over all parts."""
        sums: dict[str, float] = {}
        for side, url in self._pages():
            page = await self._get(side, url)
            for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", page, re.MULTILINE):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def held(self) -> dict[str, float]:
        """Metrics of `HELD` that are not zero."""
        found = await self.metrics()
        return {name: found[name] for name in HELD if found.get(name)}

    async def run(self, name: str, command: list[str], env: dict[str, str]) -> None:
        """Run a client at the PD site.

        Raises:
            SystemExit: It failed.
        """
        with (self.place / f"{name}.log").open("wb") as log:
            process = await self.wan.run(
                HOME, command, stdout=log, stderr=log, cwd=self.place, env=env
            )
            if await process.wait():
                raise SystemExit(f"{name} ended with {process.returncode}: {log.name}")

    def _pages(self) -> list[tuple[Side, str]]:
        engines: list[tuple[Side, str]] = [
            (side, self.engine_url(side, i)) for side in (AWAY, HOME) for i in range(NUM_ENGINES)
        ]
        pools = [(side, f"http://127.0.0.1:{ADMIN_PORT}") for side in (AWAY, HOME)]
        return [(HOME, f"http://{GATEWAY}"), *engines, *pools]

    async def _get(self, side: Side, url: str) -> str:
        command = ["curl", "-s", "--fail", "--noproxy", "*", f"{url}/metrics"]
        process = await self.wan.run(side, command, stdout=asyncio.subprocess.PIPE)
        page, _ = await process.communicate()  # empty while nobody listens
        return page.decode()


@asynccontextmanager
async def lab(place: Path, rate: int, rtt_ms: float, time_scale: float) -> AsyncIterator[Lab]:
    """Both sites, ready."""
    prepare(place)
    async with Wan(rtt_ms=rtt_ms, rate_bits_per_s=rate) as wan:
        made = Lab(wan, place, MODEL)
        scales = ["--time-scale", str(time_scale), "--bytes-scale", "0.001", "--block-tokens", "64"]
        engines = {
            side: {f"{CLUSTERS[side]}-{i}": "" for i in range(NUM_ENGINES)} for side in (AWAY, HOME)
        }
        for side in (HOME, AWAY):
            await made.start_pool(side, POOL_MEMORY, f"127.0.0.1:{ADMIN_PORT}")
            await made.start_engines(side, list(engines[side]), *scales)
        await made.start_gateway([f"offload_threshold = {THRESHOLD}"], engines)
        async with asyncio.timeout(READY_S):
            while not await _is_ready(made):  # noqa: ASYNC110 - they say it on pages only
                await asyncio.sleep(0.5)
        yield made


async def _is_ready(made: Lab) -> bool:
    found = await made.metrics()
    ready = found.get("prfaas_engine_ready") == 2 * NUM_ENGINES
    return ready and found.get("prfaas_link_up", 0) >= 1 and found.get("prfaas_index_blocks") == 0
