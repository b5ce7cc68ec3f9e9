"""A running deployment of an arm: its load, its CPU time, and its counters."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from prfaas.cli.host.processes import ProcessPart
from tests.deployments import started

from .arms import KEY, MODEL, OPERATOR, Arm, laid

CONCURRENT = 4
SHARED_TOKENS, OWN_TOKENS = 2048, 6144
"""Of a prompt: a system prompt that all have in common, and what no other has."""
USERS = 16
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
KINDS = {"gateway": "gateway", "pool node": "pools"}
"""By the kind of a part; all others are engines."""


@dataclass
class Burst:
    """Figures of one turn of load.

    Attributes:
        seconds: Its length.
        ttft_s: Times to the first token of completed requests.
        cpu_s: CPU time by kind of process.
        failed: Requests without an answer.
    """

    seconds: float
    ttft_s: list[float]
    cpu_s: dict[str, float]
    failed: int = 0

    @property
    def rate(self) -> float:
        """Completed requests per second."""
        return len(self.ttft_s) / self.seconds

    def cpu_ms(self, kind: str = "") -> float:
        """CPU time of a completed request, milliseconds, of all processes or of a kind."""
        total = self.cpu_s[kind] if kind else sum(self.cpu_s.values())
        return 1e3 * total / max(1, len(self.ttft_s))


@dataclass
class Site:
    """A running deployment."""

    arm: Arm
    url: str
    parts: list[ProcessPart]
    http: aiohttp.ClientSession
    chance: np.random.Generator
    bursts: list[Burst] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shared = self.chance.integers(0, 256, SHARED_TOKENS).tolist()

    async def burst(self, seconds: float) -> Burst:
        """Ask as fast as CONCURRENT clients can."""
        before, began = self.cpu_s(), time.monotonic()
        found = Burst(seconds, [], {})
        await asyncio.gather(*(self._client(began + seconds, found) for _ in range(CONCURRENT)))
        found.seconds = time.monotonic() - began
        found.cpu_s = {kind: value - before[kind] for kind, value in self.cpu_s().items()}
        return found

    async def _client(self, ends_at: float, found: Burst) -> None:
        headers = {"Authorization": f"Bearer {KEY}"} if self.arm.has_tenants else {}
        while time.monotonic() < ends_at:
            body = self._body()
            began = time.monotonic()
            url = f"{self.url}/v1/completions"
            async with self.http.post(url, data=body, headers=headers) as reply:
                first = await reply.content.readline()
                ttft_s = time.monotonic() - began
                await reply.read()
            if reply.status == 200 and first.startswith(b"data: {"):
                found.ttft_s.append(ttft_s)
            else:
                found.failed += 1

    def _body(self) -> bytes:
        own = self.chance.integers(0, 256, OWN_TOKENS).tolist()
        body = {
            "model": MODEL,
            "prompt": self._shared + own,
            "max_tokens": 2,
            "ignore_eos": True,
            "stream": True,
            "user": f"user-{self.chance.integers(USERS)}",
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def cpu_s(self) -> dict[str, float]:
        """CPU time of the processes since their start, by kind."""
        found: dict[str, float] = defaultdict(float)
        for part in self.parts:
            assert part.process is not None
            fields = Path(f"/proc/{part.process.pid}/stat").read_text().rpartition(")")[2].split()
            found[KINDS.get(part.kind, "engines")] += (int(fields[11]) + int(fields[12])) * TICK_S
        return dict(found)

    async def counter(self, name: str, kind: str, labels: str = "") -> float:
        """Sum of a counter over the processes of a kind."""
        total = 0.0
        headers = {"Authorization": f"Bearer {OPERATOR}"} if self.arm.has_tenants else {}
        for part in self.parts:
            if KINDS.get(part.kind) != kind:
                continue
            base = self.url if kind == "gateway" else part.health_url.rpartition("/")[0]
            async with self.http.get(f"{base}/metrics", headers=headers) as reply:
                lines = (await reply.text()).splitlines()
            total += sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.partition("{")[0].partition(" ")[0] == name and labels in line
            )
        return total

    async def linked(self) -> None:
        """Wait until prompts are prefilled in the other cluster."""
        headers = {"Authorization": f"Bearer {OPERATOR}"} if self.arm.has_tenants else {}
        async with asyncio.timeout(60):
            while True:
                async with self.http.get(f"{self.url}/control/status", headers=headers) as reply:
                    links = (await reply.json())["links"]
                if links and all(link["is_up"] for link in links):
                    return
                await asyncio.sleep(0.1)


@asynccontextmanager
async def running(arm: Arm, local: Path, seed: int) -> AsyncIterator[Site]:
    """Start the deployment of an arm in a folder, and stop it."""
    topology, made = await laid(arm, local)
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        started(
            [[p for p in made if p.kind == "pool node"], [p for p in made if p.kind != "pool node"]]
        ),
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        site = Site(arm, topology.gateway_url, made, http, np.random.default_rng(seed))
        await site.linked()
        yield site
