"""Timing engines that come and go at random under requests: their answers, and the index.

    python -m tests.engines.timing.churn --engines 200 --events 1000 --rate 20

Engines, pool nodes, gateway and API server are real but for the time of a prefill and the API
server, with KV events over ZMQ, in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prfaas.core.kv.blocks import BlockKey, GroupKind, Layout
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState, Tier
from prfaas.engines.timing.api.server import Server
from prfaas.engines.timing.host import InstanceHost
from tests.gateway.churn import Churn, following, run
from tests.membership.fake_api import FakeApi
from tests.pool.sites import LOOPBACK
from tests.ports import free_port

from .deployment import World, running
from .worlds import settings, write_plan

NUM_DOCUMENTS = 30
TIME_SCALE = 0.05
"""A prompt takes some milliseconds, so that legs run while engines leave."""
POOL_BYTES = 1 << 26


@dataclass
class TimingChurn(Churn):
    """A run with timing engines that publish KV events."""

    world: World = field(kw_only=True)
    host: InstanceHost = field(kw_only=True)
    """Makes engines of the pool node of the PD cluster."""
    alone: InstanceHost = field(kw_only=True)
    """One engine that shares nothing: its answers are right."""
    alone_url: str = field(kw_only=True)
    servers: dict[str, Server] = field(default_factory=dict)
    stopping: set[asyncio.Task[None]] = field(default_factory=set)
    answers: dict[tuple[int, ...], asyncio.Task[str]] = field(default_factory=dict)

    async def ask(self) -> None:
        """A question on one of some documents."""
        number = self.chance.randrange(NUM_DOCUMENTS)
        prompt = [number, *range(30, 80 + 4 * number), self.chance.randrange(200)]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "model": "timing-tiny"}
        async with self.world.http.post(f"{self.world.url}/v1/completions", json=body) as reply:
            answer = await reply.json()
        self.counts["requests"] += 1
        if reply.status != 200:
            self.errors.append(f"{reply.status}: {answer}")
            return
        usage = answer["usage"]["prompt_tokens_details"] or {}
        self.counts["cached"] += bool(usage.get("cached_tokens"))
        text, right = answer["choices"][0]["text"], await self._answer_alone(prompt)
        if text != right:
            self.errors.append(f"{text!r} in place of {right!r}")

    async def start(self, name: str) -> dict[str, int]:
        """See `Churn`. A pod's name is another one's only once it has ended."""
        if name in self.servers:
            await self.api.put(self._slice(name, ready=False))
            await self._until(lambda: not self._takes(name))
            self.remote.add(name)
            await self._until(lambda: self.gateway.engines.by_name[name].num_in_flight == 0)
            await self.servers.pop(name).close()
        events, replay = free_port(), free_port()
        where = tuple(f"tcp://{LOOPBACK}:{port}" for port in (events, replay))
        self.host._settings.kv_events[name] = where  # type: ignore[index]
        self.servers[name] = server = self.host._server(name)
        url = await server.start(LOOPBACK, 0)
        http = int(url.rpartition(":")[2])
        return {"http": http, "kv-events": events, "kv-replay": replay}

    async def left(self, name: str) -> None:
        """The pod ends once its requests have."""
        task = asyncio.create_task(self._end(name, self.servers.pop(name)))
        self.stopping.add(task)

    async def close(self) -> None:
        """See `Churn`."""
        await asyncio.gather(*self.stopping, *self.answers.values())
        for server in self.servers.values():
            await server.close()
        await self.alone.close()

    async def _end(self, name: str, server: Server) -> None:
        await self._until(lambda: name not in self.gateway.engines.by_name)
        await server.close()

    async def _answer_alone(self, prompt: list[int]) -> str:
        key = tuple(prompt)
        if key not in self.answers:
            self.answers[key] = asyncio.create_task(self._ask_alone(prompt))
        return await self.answers[key]

    async def _ask_alone(self, prompt: list[int]) -> str:
        url = f"{self.alone_url}/v1/completions"
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
        async with self.world.http.post(url, json=body) as reply:
            return str((await reply.json())["choices"][0]["text"])

    async def equal_index(self) -> int:
        """Wait until the index knows of every engine and pool node exactly the blocks that are
        there.

        Returns:
            Number of blocks of the engines.
        """
        index = self.gateway.index
        for name, server in self.servers.items():
            await self._until(lambda name=name: index.state(name) is SourceState.EXACT)  # type: ignore[misc]
            await self._until(lambda n=name, s=server: holds_just(index, n, s, held(s)))  # type: ignore[misc]
        for pool, site in self.world.sites.items():
            store = site.node.store
            await self._until(lambda p=pool, s=store: index.num_blocks(p) == len(s))  # type: ignore[misc]
            layouts = {i.layout.layout_id: i.layout for i in self.world.instances}
            for layout_id, layout in layouts.items():
                found = {key for each, key in store.names() if each == layout_id}
                assert lists(index, pool, layout, found, Tier.HOST), pool
        return sum(len(held(server)) for server in self.servers.values())


def held(server: Server) -> set[BlockKey]:
    """Blocks in the prefix cache of an engine."""
    cache, groups = server.instance.cache, server.instance.layout.groups
    return {
        BlockKey(group.index, block_hash)
        for number, block_hash in cache._hash_of.items()
        for group in groups
        if cache._cache.holds(~number if group.kind is GroupKind.LINEAR_STATE else number)
    }


def holds_just(index: PrefixIndex, name: str, server: Server, blocks: set[BlockKey]) -> bool:
    """Return True if the index lists these blocks of an engine, each of them, and no other."""
    if index.num_blocks(name) != len(blocks):
        return False
    return lists(index, name, server.instance.layout, blocks, Tier.DEVICE)


def lists(index: PrefixIndex, name: str, layout: Layout, blocks: set[BlockKey], tier: Tier) -> bool:
    """Return True if the index lists each of these blocks of a source."""
    by_group = {g.index: [h for of, h in blocks if of == g.index] for g in layout.groups}
    return all(
        index.num_held(
            name,
            replace(layout, tokens_per_hash=group.tokens_per_block),
            group,
            by_group[group.index],
            tier,
        )
        == len(by_group[group.index])
        for group in layout.groups
    )


@asynccontextmanager
async def churning(
    directory: Path, checkpoint: Path, identities: Path, most: int, seed: int, poll_s: float
) -> AsyncIterator[TimingChurn]:
    """A churn of timing engines beside the two PD engines and the PrfaaS engine of a deployment."""
    plan = write_plan(directory)
    alone = InstanceHost(settings(plan, checkpoint, "alone"))
    urls = await alone.start()
    async with running(
        directory,
        checkpoint,
        identities,
        time_scale=TIME_SCALE,
        pd_memory_bytes=POOL_BYTES,
        poll_s=poll_s,
    ) as world:
        made = settings(plan, checkpoint, time_scale=TIME_SCALE)
        host = InstanceHost(replace(made, pool=directory / "pd-pool.sock", cache_tokens=1024))
        churn = TimingChurn(
            world.gateway,
            FakeApi(page_items=50),
            most,
            random.Random(seed),
            world=world,
            host=host,
            alone=alone,
            alone_url=urls["alone"],
        )
        async with following(churn, directory):
            yield churn


async def main(num_engines: int, num_events: int, per_s: float) -> None:
    """Run it once and print what was seen."""
    from prfaas.engines.checkpoint import make_checkpoint
    from prfaas.wire.identity import make_authority, make_identity

    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder)
        make_authority(local)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(local, name)
        make_checkpoint(local / "tokenizer", weights=False)
        async with churning(local, local / "tokenizer", local, num_engines, 1, 2.0) as churn:
            began_s = time.monotonic()
            await run(churn, num_events, per_s=per_s)
            churn.report(num_events, time.monotonic() - began_s)
            num_blocks = await churn.equal_index()
    print(f"the index equals the content of {len(churn.ports)} engines: {num_blocks} blocks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(main(given.engines, given.events, given.rate))
