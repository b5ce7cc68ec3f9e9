"""One gateway over timing engines, and streamed requests to it whose first tokens are timed."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas.cli.deploy.topology import parts
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.engines.timing.api.vocabulary import Vocabulary
from tests.deployments import laid_out, started

from .site import MODEL

LIMIT_S = 150.0
OUTPUT_TOKENS = 8


@dataclass
class Sent:
    """One request, as its client saw it.

    Attributes:
        request_id: Unique.
        sent_at_s: Instant of the monotonic clock.
        status: Of the answer; 0 without one.
        ttft_s: Until the first token; 0 without one.
    """

    request_id: str
    sent_at_s: float
    status: int = 0
    ttft_s: float = 0.0


class Streams:
    """Sends requests at a steady rate.

    Args:
        url: Of the gateway.
        model: Checkpoint directory.
        http: Sends them.
    """

    def __init__(self, url: str, model: Path, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http
        self._spoken = Vocabulary(str(model)).spoken
        self._chance = random.Random(1)
        self.sent: list[Sent] = []
        self.engines: dict[str, str] = {}
        """Base URLs by name."""

    async def send(self, number: int, per_s: float, length: Callable[[random.Random], int]) -> None:
        """Send so many prompts of lengths that `length` draws, and wait for all answers."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(number):
                prompt = self._chance.choices(self._spoken, k=length(self._chance))
                group.create_task(self._one(prompt))
                due += 1 / per_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def get(self, path: str) -> dict[str, object]:
        """Return the answer of the gateway."""
        async with self.http.get(self.url + path) as reply:
            found: dict[str, object] = await reply.json()
            return found

    async def records(self) -> dict[str, dict[str, object]]:
        """Records of the requests at the gateway, by request id."""
        found = (await self.get("/control/requests?limit=1000"))["requests"]
        assert isinstance(found, list)
        return {record["request_id"]: record for record in found}

    async def _one(self, prompt: list[int]) -> None:
        sent = Sent(f"stream-{len(self.sent)}", time.monotonic())
        self.sent.append(sent)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True}
        headers = {"X-Request-Id": sent.request_id}
        async with self.http.post(
            f"{self.url}/v1/completions", json=body, headers=headers
        ) as reply:
            async for line in reply.content:
                if not sent.ttft_s and line.startswith(b"data: {"):
                    assert "error" not in json.loads(line[6:]), line
                    sent.ttft_s = time.monotonic() - sent.sent_at_s
            sent.status = reply.status


@asynccontextmanager
async def streaming(file: Path) -> AsyncIterator[tuple[Streams, Supervisor]]:
    """Start the deployment of a file, and stop it."""
    topology = await laid_out(file)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        started(parts(topology)) as supervisor,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
    ):
        streams = Streams(topology.gateway_url, Path(topology.deployment.model.path), http)
        streams.engines = topology.engines
        while True:
            async with http.get(f"{topology.gateway_url}/health?full=1") as reply:
                if reply.status == 200:
                    break
            await asyncio.sleep(0.1)
        yield streams, supervisor


def at(sent: list[Sent], ratio: float) -> float:
    """A percentile of the times to first token, s; 0 without any."""
    times = sorted(each.ttft_s for each in sent if each.ttft_s)
    return times[min(int(ratio * len(times)), len(times) - 1)] if times else 0.0
