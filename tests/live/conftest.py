"""A real deployment: two vLLM engines on the CPU, two pool nodes, a gateway, and a wire to cut."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
import pytest
import pytest_asyncio

from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.config.addresses import split_address
from prfaas.config.deployment import Deployment
from prfaas.gateway.app import Gateway
from tests.deployments import LAPTOP, ROOT, laid_out, placed, put_between, started
from tests.live.relay import Relay

T = TypeVar("T")
LEFT = ("prefill/stalled", "transfer/late")
"""Fallbacks by which the gateway leaves a slow route: on a machine that stands still any may be."""
DEV_MODE = """
[clusters.prfaas.engines.prfaas-engine.env]
VLLM_SERVER_DEV_MODE = "1"
[clusters.pd.engines.pd-engine.env]
VLLM_SERVER_DEV_MODE = "1"
"""
"""Of vLLM's endpoints, the one that resets an engine's prefix cache."""


@dataclass
class Live:
    """The running deployment."""

    topology: Topology
    supervisor: Supervisor
    relay: Relay
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.topology.gateway_url

    @property
    def model(self) -> str:
        return self.topology.deployment.model.name

    def chat_body(self, text: str, **extra: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 24,
        } | extra

    async def chat(self, text: str, **extra: Any) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Ask the gateway; the answer and the response headers."""
        url = f"{self.url}/v1/chat/completions"
        async with self.http.post(url, json=self.chat_body(text, **extra)) as reply:
            body = await reply.json()
            assert reply.status == 200, body
            return body, reply.headers.copy()

    async def alone(self, text: str, salt: str, **extra: Any) -> str:
        """Return the answer of the decode engine alone, with an empty cache."""
        url = f"{self.topology.engines['pd-engine']}/v1/chat/completions"
        body = self.chat_body(text, cache_salt=f"alone {salt}", **extra)
        async with self.http.post(url, json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            return str(answer["choices"][0]["message"]["content"])

    async def look(self, text: str) -> dict[str, dict[str, Any]]:
        """Hits of a chat in the gateway's index, by pool node and engine.

        Waits for an engine that can take the chat: one that was restarted is found ready by the
        gateway's next probe only.
        """
        body = {"messages": self.chat_body(text)["messages"]}

        async def answer() -> dict[str, Any] | None:
            async with self.http.post(f"{self.url}/kv/lookup", json=body) as reply:
                found: dict[str, Any] = await reply.json()
                assert reply.status in (200, 503), found
                return found if reply.status == 200 else None

        clusters = (await until(answer))["clusters"]
        return {each["name"]: each for c in clusters for each in (*c["pools"], *c["engines"])}

    async def record(self, request_id: str) -> dict[str, Any]:
        """Return the gateway's record of a request that has ended."""

        async def ended() -> dict[str, Any] | None:
            async with self.http.get(f"{self.url}/control/requests/{request_id}") as reply:
                record: dict[str, Any] = await reply.json()
                pending = record["outcome"] == "running" or record["transfer_state"] == "open"
                return None if pending else record

        return await until(ended)

    async def metric(self, url: str, name: str, **labels: str) -> float:
        """A sample of a Prometheus page, 0 if it is not there."""
        async with self.http.get(f"{url}/metrics") as reply:
            page = await reply.text()
        return sum(
            float(value)
            for found, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", page, re.MULTILINE)
            if all(f'{label}="{wanted}"' in found for label, wanted in labels.items())
        )

    def pool_admin(self, pool: str) -> str:
        return self.supervisor.part(pool).health_url.removesuffix("/health")

    async def remote_again(self, tag: str) -> dict[str, Any]:
        """Send long prompts until one is prefilled remotely; its record."""
        number = 0

        async def attempt() -> dict[str, Any] | None:
            nonlocal number
            number += 1
            request_id = f"{tag}-again-{number}".replace(" ", "-")
            text = f"{tag} {number} " + document(2500)
            async with self.http.post(
                f"{self.url}/v1/chat/completions",
                json=self.chat_body(text, max_tokens=2),
                headers={"X-Request-Id": request_id},
            ) as reply:
                assert reply.status == 200, await reply.text()
            record = await self.record(request_id)
            arrived = record["path"] == "remote" and record["fallback"] is None
            return record if arrived else None

        return await until(attempt)


async def until(probe: Callable[[], Awaitable[T | None]], timeout_s: float = 30.0) -> T:
    """Ask until the answer is something; polls real state, bounded."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = await probe()
            if found:
                return found
            await asyncio.sleep(0.02)


def document(num_chars: int, start: int = 0) -> str:
    """Real text of that length."""
    text = (ROOT / "LICENSE").read_text()
    return (text * 2)[start : start + num_chars]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """Started once, and stopped before the tests of other folders; every test leaves it whole."""
    topology = await laid_out(*placed(LAPTOP, tmp_path_factory.mktemp("live"), DEV_MODE))
    relay = Relay(topology.pools["pd-pool"])
    stages = parts(topology)
    put_between(stages, "prfaas-pool", "pd-pool", await relay.start())
    try:
        async with started(stages) as supervisor, aiohttp.ClientSession() as http:
            yield Live(topology, supervisor, relay, http)
    finally:
        await relay.stop()


@asynccontextmanager
async def gateway_over(live: Live, deployment: Deployment) -> AsyncIterator[tuple[Gateway, Live]]:
    """A second gateway over the same engines and pools, once it sees all of them.

    There is a link from the first pool to the second only, also where it takes both for hosts of
    one site.

    Args:
        live: What runs.
        deployment: The same parts, served in another way.

    Yields:
        The gateway, and what runs as it is seen through it.
    """
    table = deployment.gateway.model_copy(update={"listen": "127.0.0.1:0"})
    deployment = deployment.model_copy(update={"gateway": table})
    gateway = make_gateway(deployment, live.topology.endpoints, poll_s=0.2)
    url = await gateway.start()

    async def is_whole() -> bool:
        engines, pools = gateway.engines.by_name.values(), gateway.pools
        known = all(each.is_ready and pools.layout(each.pool, each.name) for each in engines)
        return known and pools.link_up("prfaas-pool", "pd-pool")

    try:
        await until(is_whole)
        address = split_address(url.removeprefix("http://"))
        yield gateway, replace(live, topology=replace(live.topology, gateway=address))
    finally:
        await gateway.close()
