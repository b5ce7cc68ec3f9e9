"""Two gateways of one deployment, as processes: the same view, and one does without the other."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from prfaas.wire.identity import make_authority, make_identity
from tests.gateway.conftest import LAYOUT, until
from tests.gateway.kv_publisher import Publisher, stored
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.scripted_pool import ScriptedPool

NAMES = ("gateway", "gateway-b")
IDS = list(range(300))


@dataclass
class Site:
    """Engines and pools of both gateways."""

    state: Path
    urls: list[str]
    processes: list[Process]
    http: aiohttp.ClientSession
    pool: ScriptedPool
    publisher: Publisher

    def hashes(self) -> list[bytes]:
        salt = salt_of(deployment_secret(self.state), DEFAULT_NAME)
        return hash_chain(IDS, tokens_per_hash=16, seed="7", cache_salt=salt)

    async def look(self, url: str) -> dict[str, Any]:
        async with self.http.post(f"{url}/kv/lookup", json={"prompt": IDS}) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def both_see(self, pool_tokens: int, device_tokens: int) -> None:
        """Wait until both say the same, and this."""
        while True:
            found = [await self.look(url) for url in self.urls]
            (cluster,) = found[0]["clusters"]
            seen = [cluster[kind][0]["hit_tokens"] for kind in ("pools", "engines")]
            if found[0] == found[1] and seen == [pool_tokens, device_tokens]:
                return

    async def post(self, url: str) -> int:
        body = {"prompt": IDS, "max_tokens": 2}
        async with self.http.post(f"{url}/v1/completions", json=body) as response:
            return response.status


@asynccontextmanager
async def two_gateways(checkpoint: Path, directory: Path) -> AsyncIterator[Site]:
    identities, state = directory / "identities", directory / "state"
    identities.mkdir()
    make_authority(identities)
    for name in (*NAMES, "pool"):
        make_identity(identities, name)
    engine = ScriptedEngine("decode")
    pool = ScriptedPool("pool", identities, {"decode": LAYOUT}, gateways=frozenset(NAMES))
    publisher = Publisher(f"ipc://{directory}/e", f"ipc://{directory}/r")
    await engine.start()
    await pool.start()
    file = directory / "deployment.toml"
    file.write_text(
        f"""
        state = "{state}"
        model = {{ name = "tiny", path = "{checkpoint}" }}
        gateway = {{ listen = "127.0.0.1:0", replicas = {{ gateway-b = "127.0.0.1:0" }} }}
        routing = {{ offload_threshold = 100 }}
        security = {{ identities = "{identities}" }}
        [clusters.pd]
        role = "pd"
        pools.pool = {{ address = "127.0.0.1:{pool.port}" }}
        engines.decode.pool = "pool"
        engines.decode.url = "{engine.url}"
        engines.decode.kv_events = "ipc://{directory}/e"
        engines.decode.kv_events_replay = "ipc://{directory}/r"
        """
    )
    processes = [
        await create_subprocess_exec(
            *(sys.executable, "-m", "prfaas", "gateway", str(file), "--name", name),
            stdout=asyncio.subprocess.PIPE,
            stderr=DEVNULL,
        )
        for name in NAMES
    ]
    try:
        async with aiohttp.ClientSession() as http:
            urls = [await listening(process) for process in processes]
            yield Site(state, urls, processes, http, pool, publisher)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        await publisher.close()
        await pool.stop()
        await engine.stop()


async def listening(process: Process) -> str:
    """Its base URL, which it prints."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    return line.decode().split()[-1]


@pytest.mark.timeout(120)
async def test_two_gateways_see_the_same_and_one_goes_on_alone(
    checkpoint: Path, tmp_path: Path
) -> None:
    async with two_gateways(checkpoint, tmp_path) as site:
        hashes = site.hashes()
        attention = [BlockKey(0, name) for name in hashes]
        await until(lambda: site.pool.num_subscriptions == 2)
        site.pool.store(LAYOUT, [*attention[:8], BlockKey(1, hashes[7])])
        site.publisher.publish(stored(hashes[:16]), stored([hashes[15]], 1))
        await site.both_see(128, 256)
        site.pool.evict(LAYOUT, attention[7:8])
        await site.both_see(0, 256)
        site.pool.store(LAYOUT, attention[7:8])
        await site.both_see(128, 256)
        assert [await site.post(url) for url in site.urls] == [200, 200]
        first, other = site.processes
        first.send_signal(signal.SIGKILL)
        await first.wait()
        with pytest.raises(aiohttp.ClientConnectionError):
            await site.post(site.urls[0])
        assert [await site.post(site.urls[1]) for _ in range(3)] == [200] * 3
        found = await site.look(site.urls[1])
        assert found["clusters"][0]["pools"][0]["state"] == "exact"
        assert other.returncode is None
