"""A gateway that stops behind a balancer: no request fails while the balancer finds out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from prfaas.cli.parts.gateway_annexes import serve
from prfaas.config.addresses import Endpoints

from .conftest import deployment_for, until
from .scripted_engine import ScriptedEngine

LOOK_S = 0.05


@dataclass
class Balancer:
    """Sends requests round robin to the gateways that its last look found healthy."""

    http: aiohttp.ClientSession
    healthy: dict[str, bool] = field(default_factory=dict)
    number: int = 0

    async def look(self) -> None:
        while True:
            for url in self.healthy:
                try:
                    async with self.http.get(f"{url}/health") as reply:
                        self.healthy[url] = reply.status == 200
                except aiohttp.ClientError:
                    self.healthy[url] = False
            await asyncio.sleep(LOOK_S)

    async def post(self) -> int:
        """Status of one completion; 0 if its gateway was gone."""
        able = [url for url, is_healthy in self.healthy.items() if is_healthy]
        self.number += 1
        url = able[self.number % len(able)]
        try:
            body = {"prompt": "hi", "max_tokens": 2}
            async with self.http.post(f"{url}/v1/completions", json=body) as reply:
                await reply.read()
                return reply.status
        except aiohttp.ClientError:
            return 0


async def test_no_request_fails_behind_a_balancer(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    engine, nowhere = ScriptedEngine("decode"), "http://127.0.0.1:9"
    await engine.start()
    endpoints = Endpoints(
        engines={"prefill": nowhere, "spare": nowhere, "decode": engine.url},
        pools=dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 9)),
    )
    stops, urls, serving = [], [], []
    for name in ("one", "two"):
        gateway = {"lame_duck": "3s"}
        deployment = deployment_for(checkpoint, identities, tmp_path / name, gateway=gateway)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stops.append(asyncio.Event())
        serving.append(asyncio.create_task(serve(deployment, endpoints, stops[-1], url.set_result)))
        urls.append(await url)
    async with aiohttp.ClientSession() as http:
        balancer = Balancer(http, dict.fromkeys(urls, False))
        looking = asyncio.create_task(balancer.look())
        await until(lambda: all(balancer.healthy.values()))
        found = [await balancer.post() for _ in range(20)]
        stops[0].set()
        # Until it is gone, and some more: all that time requests come.
        while not serving[0].done():
            found.append(await balancer.post())
        assert not balancer.healthy[urls[0]]
        found += [await balancer.post() for _ in range(20)]
        looking.cancel()
    stops[1].set()
    await asyncio.gather(*serving)
    await engine.stop()
    assert set(found) == {200}
    assert len(found) > 50


async def test_alone_it_refuses_at_once(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    gateway = {"lame_duck": "1h"}
    deployment = deployment_for(checkpoint, identities, tmp_path, gateway=gateway)
    nowhere = dict.fromkeys(("prefill", "spare", "decode"), "http://127.0.0.1:9")
    pools = dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 9))
    stop = asyncio.Event()
    stop.set()
    await serve(deployment, Endpoints(nowhere, pools), stop, is_alone=lambda: True)
