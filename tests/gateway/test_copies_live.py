"""A copy between two real pool nodes, over a real link, with the gateway's ticket."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp

from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.config.addresses import Endpoints
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.identity import identity_in
from tests.plans import plan_file
from tests.pool.sites import LAYOUT, LOOPBACK, MEMORY, Engine, Site

from .conftest import TIMING, deployment_for, until
from .prompts import LONG
from .scripted_engine import ScriptedEngine

HELD = 320


async def site(name: str, identities: Path, directory: Path, peer: Site | None) -> Site:
    made = Site(
        PoolProcessSettings(
            name=name,
            memory_bytes=MEMORY,
            listen=(LOOPBACK, 0),
            socket_path=directory / f"{name}.sock",
            admin=(LOOPBACK, 0),
            identity=identity_in(identities, name),
            peers={} if peer is None else {"pd-pool": (LOOPBACK, peer.port)},
            sources=frozenset({"prfaas-pool"} if peer is None else ()),
            gateways=frozenset({"gateway"}),
        )
    )
    await made.ready()
    return made


async def ask(url: str, times: int) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(times):
            body = {"prompt": LONG, "max_tokens": 2}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200


def keys_of_prompt(salt: str, ids: list[int]) -> list[BlockKey]:
    hashes = hash_chain(ids, tokens_per_hash=16, seed=LAYOUT.hash_seed, cache_salt=salt)
    attention = [BlockKey(0, hashes[end // 16 - 1]) for end in range(16, HELD + 1, 16)]
    return [*attention, BlockKey(1, hashes[HELD // 16 - 1])]


async def test_a_hot_prefix_comes_home(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    engines = [ScriptedEngine(name) for name in ("prefill", "decode", "spare")]
    for engine in engines:
        await engine.start()
    pd = await site("pd-pool", identities, tmp_path, None)
    prfaas = await site("prfaas-pool", identities, tmp_path, pd)
    stores = Engine("prefill", tmp_path / "prfaas-pool.sock", identities)
    takes = Engine("decode", tmp_path / "pd-pool.sock", identities)
    routing = {"plan": str(plan_file(tmp_path)), "policy": "local", "replication": "100Mbps"}
    gateway = make_gateway(
        deployment_for(checkpoint, identities, tmp_path / "state", routing=routing),
        Endpoints(
            {engine.name: engine.url for engine in engines},
            {"pd-pool": (LOOPBACK, pd.port), "prfaas-pool": (LOOPBACK, prfaas.port)},
        ),
        poll_s=0.02,
        timing=TIMING,
    )
    url, copier = await gateway.start(), gateway.loops.copier
    assert copier is not None
    try:
        pools = gateway.pools
        await until(lambda: pools.link_up("prfaas-pool", "pd-pool"))
        await until(lambda: pools.layout("pd-pool", "decode") is not None)
        await until(lambda: gateway.engines.by_name["decode"].is_ready)
        await ask(url, 1)
        [call] = engines[1].calls
        keys = keys_of_prompt(call.body["cache_salt"], call.body["prompt"])
        assert await stores.store(keys)
        await until(lambda: gateway.index.num_blocks("prfaas-pool") == len(keys))
        await ask(url, 3)
        gateway.control_ticker.beat(time.monotonic_ns(), is_turn=True)
        await until(lambda: pd.held() == set(keys))
        await until(lambda: copier.num_open == 0)
        assert gateway.driver.dispatcher.promised_bytes == 0
        assert await takes.load(keys) == [True] * len(keys)
    finally:
        await gateway.close()
        for each in (stores, takes):
            await asyncio.to_thread(each.close)
        for node in (prfaas, pd):
            await node.kill()
        for engine in engines:
            await engine.stop()
