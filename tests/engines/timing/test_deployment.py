"""Timing engines in two clusters, with pool nodes, a link and a gateway: all of it real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest

from prfaas.config.deployment import Deployment
from prfaas.engines.checkpoint import make_checkpoint
from prfaas.engines.timing.host import Host
from prfaas.engines.timing.instance import Instance
from prfaas.gateway.app import Gateway
from prfaas.gateway.endpoints import Endpoints
from prfaas.gateway.pools import PoolTiming
from prfaas.lab.faults import FaultProxy
from prfaas.pool.settings import PoolSettings
from prfaas.wire.identity import identity_in, make_authority, make_identity
from tests.pool.sites import LOOPBACK, Site, until

from .worlds import MODEL, PLAN, SPAN, settings, started, write_plan

pytestmark = pytest.mark.timeout(180)
THRESHOLD = 200
LONG, SHORT = list(range(300)), list(range(100))
PD_ENGINES = ("pd-0", "pd-1")


@dataclass
class World:
    """Everything, and how it is reached."""

    url: str
    http: aiohttp.ClientSession
    gateway: Gateway
    sites: dict[str, Site]
    hosts: list[Host]
    wire: FaultProxy

    def instance(self, name: str) -> Instance:
        return next(h.servers[name].instance for h in self.hosts if name in h.servers)

    @property
    def instances(self) -> list[Instance]:
        return [server.instance for host in self.hosts for server in host.servers.values()]

    async def complete(
        self,
        prompt: list[int] | str,
        key: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
        **body: Any,
    ) -> dict[str, Any]:
        headers = {**headers, "Authorization": f"Bearer {key}"} if key else headers
        asked = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **body}
        async with self.http.post(
            f"{self.url}/v1/completions", json=asked, headers=headers
        ) as reply:
            answer: dict[str, Any] = await reply.json()
            assert reply.status == 200, answer
            return answer

    async def text(self, prompt: list[int]) -> str:
        return str((await self.complete(prompt))["choices"][0]["text"])

    async def record(self) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/control/requests") as reply:
            found: dict[str, Any] = (await reply.json())["requests"][0]
            return found

    def is_quiet(self) -> bool:
        """Nobody computes, waits or holds anything for a request."""
        engines = all(
            not (i.num_waiting or i.scheduler.num_running)
            and i.tier is not None
            and i.tier.rows.num_free == i.tier.rows.num_rows
            for i in self.instances
        )
        links = [link for site in self.sites.values() for link in site.node.links.values()]
        inbound = sum(site.node.inbound.num_open for site in self.sites.values())
        legs = sum(engine.num_in_flight for engine in self.gateway.engines.by_name.values())
        return engines and not inbound + legs + sum(link.num_open for link in links)

    def forget(self) -> None:
        """Empty the prefix caches of all instances."""
        for instance in self.instances:
            instance.cache.clear()


@asynccontextmanager
async def running(
    directory: Path,
    checkpoint: Path,
    identities: Path,
    time_scale: float = 0.001,
    kv_events: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    *,
    has_wire: bool = False,
    plan_text: str = PLAN,
    pd_memory_bytes: int = 1 << 22,
    **tables: Any,
) -> AsyncIterator[World]:
    """A world; `kv_events` is where engines publish and repeat them, `has_wire` that pools are
    linked through its `wire`, and `plan_text` what engines are like."""
    async with AsyncExitStack() as stack:
        sites = {}
        peers: dict[str, tuple[str, int]] = {}
        wire = FaultProxy((LOOPBACK, 0))
        if has_wire:
            await wire.open()
            stack.push_async_callback(wire.close)
        for name in ("pd-pool", "prfaas-pool"):
            site = Site(
                PoolSettings(
                    name=name,
                    memory_bytes=pd_memory_bytes if name == "pd-pool" else 1 << 22,
                    listen=(LOOPBACK, 0),
                    socket_path=directory / f"{name}.sock",
                    admin=(LOOPBACK, 0),
                    identity=identity_in(identities, name),
                    peers=dict(peers),
                    sources=frozenset({"prfaas-pool"} if name == "pd-pool" else ()),
                    gateways=frozenset({"gateway"}),
                    tracing=tables.get("tracing", {}).get("endpoint"),
                )
            )
            await site.ready()
            stack.push_async_callback(site.kill)
            sites[name], peers = site, {name: (LOOPBACK, site.port)}
            if has_wire and name == "pd-pool":
                wire.target, peers[name] = peers[name], (LOOPBACK, wire.port)
        plan, hosts = write_plan(directory, plan_text), []
        urls: dict[str, str] = {}
        for pool, cluster, names in (
            ("prfaas-pool", "prfaas", ("prfaas-0",)),
            ("pd-pool", None, PD_ENGINES),
        ):
            socket = directory / f"{pool}.sock"
            made = settings(
                plan,
                checkpoint,
                *names,
                cluster=cluster,
                pool=socket,
                time_scale=time_scale,
                kv_events={name: kv_events[name] for name in names if name in kv_events},
            )
            host, theirs = await started(made)
            stack.push_async_callback(host.close)
            hosts.append(host)
            urls |= theirs
        deployment = deployment_of(
            checkpoint, identities, directory / "state", kv_events=kv_events, **tables
        )
        ports = {name: (LOOPBACK, site.port) for name, site in sites.items()}
        gateway = Gateway(
            deployment,
            Endpoints(engines=urls, pools=ports),
            poll_s=0.02,
            timing=PoolTiming(backoff_s=0.01, backoff_max_s=0.05),
        )
        url = await gateway.start()
        stack.push_async_callback(gateway.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        world = World(url, http, gateway, sites, hosts, wire)
        await until(lambda: is_well(world))
        yield world
        await until(world.is_quiet)


def is_well(world: World) -> bool:
    engines, pools = world.gateway.engines.by_name, world.gateway.pools
    announced = [pools.layout(engine.pool, engine.name) for engine in engines.values()]
    ready = all(engine.is_ready for engine in engines.values())
    return ready and all(announced) and pools.link_up("prfaas-pool", "pd-pool")


def deployment_of(
    checkpoint: Path,
    identities: Path,
    state: Path,
    roles: Mapping[str, str] = MappingProxyType({}),
    kv_events: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    **tables: Any,
) -> Deployment:
    def cluster(role: str, pool: str, names: tuple[str, ...]) -> dict[str, Any]:
        engines: dict[str, Any] = {
            name: {"pool": pool, "role": roles.get(name, "both")} for name in names
        }
        for name in names:
            where = zip(("kv_events", "kv_events_replay"), kv_events.get(name, ()), strict=False)
            engines[name] |= dict(where)
        return {"role": role, "pools": {pool: {}}, "engines": engines}

    return Deployment.model_validate(
        {
            "model": {"name": MODEL, "path": str(checkpoint)},
            "gateway": {"listen": f"{LOOPBACK}:0"},
            "routing": {"offload_threshold": THRESHOLD},
            "security": {"identities": str(identities)},
            "state": str(state),
            **tables,
            "clusters": {
                "prfaas": cluster("prfaas", "prfaas-pool", ("prfaas-0",)),
                "pd": cluster("pd", "pd-pool", PD_ENGINES),
            },
        }
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("models") / "tokenizer"
    make_checkpoint(path, weights=False)
    # What it imports takes seconds, in which pool nodes on this event loop would look dead.
    AutoTokenizer.from_pretrained(path)
    return path


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(directory, name)
    return directory


@pytest.fixture
async def world(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path, checkpoint, identities) as made:
        yield made


async def alone(checkpoint: Path, directory: Path, prompt: list[int]) -> str:
    """What an engine without any pool answers."""
    host, urls = await started(settings(write_plan(directory), checkpoint, "alone"))
    async with aiohttp.ClientSession() as http:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
        async with http.post(f"{urls['alone']}/v1/completions", json=body) as reply:
            text = str((await reply.json())["choices"][0]["text"])
    await host.close()
    return text


async def test_both_paths_give_the_same_answer(
    world: World, checkpoint: Path, tmp_path: Path
) -> None:
    for prompt, path in ((LONG, "remote"), (SHORT, "local")):
        reply = await world.complete(prompt)
        record = await world.record()
        assert (record["path"], record["fallback"]) == (path, None)
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, prompt)
    decoded_by = next(i for i in world.instances if i.name in PD_ENGINES and i.counts.steps)
    assert decoded_by.counts.external_hit_tokens == 288
    assert world.instance("prfaas-0").counts.prompt_tokens == len(LONG)


async def test_one_engine_hands_over_to_another_of_its_pool(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    roles = {"pd-0": "prefill", "pd-1": "decode"}
    async with running(tmp_path, checkpoint, identities, roles=roles) as world:
        prefills, decodes = map(world.instance, PD_ENGINES)
        reply = await world.complete(SHORT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["prefill_engine"], record["decode_engine"]) == PD_ENGINES
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, SHORT)
        assert prefills.counts.prompt_tokens == len(SHORT)
        assert decodes.counts.external_hit_tokens == 96
        await world.complete(LONG)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert record["decode_engine"] == "pd-1"
        assert prefills.counts.prompt_tokens == len(SHORT)


async def test_cached_tokens_are_those_of_who_prefilled(world: World) -> None:
    async def cached(prompt: list[int]) -> int:
        details = (await world.complete(prompt))["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    # The remote prefill had nothing, though decode found all of it a moment later.
    assert await cached(LONG) == 0
    await until_hit(world, LONG, 288)
    assert await cached(LONG) == 288
    assert (await world.record())["path"] == "local"
    # Another instance of the cluster has it from the pool node.
    world.forget()
    assert await cached(LONG + [1] * 40) == 288


async def until_hit(world: World, prompt: list[int], num_tokens: int) -> None:
    """Wait until the gateway has heard what the PD pool holds."""
    while (await world.record())["pd_hit_tokens"] != num_tokens:
        await world.complete(prompt)


async def test_a_wrong_block_shows_as_a_wrong_answer(
    world: World,
) -> None:
    right = await world.text(LONG)
    world.forget()
    await until(world.is_quiet)
    write_wrong(world.sites["pd-pool"], lambda group: group == 1)
    wrong = await world.text(LONG)
    assert wrong != right
    assert sum(instance.counts.stained for instance in world.instances) == 1
    # What follows from it is wrong as well, on whatever engine.
    assert await world.text(LONG) == wrong


def write_wrong(site: Site, chosen: Callable[[int], bool]) -> None:
    """Change a byte of stored blocks behind the back of their digests."""
    for name in list(site.node.store.names()):
        block = site.node.store.get(*name)
        if block is not None and chosen(name[1].group):
            block.data[0] ^= 1


async def test_who_leaves_frees_slots_rows_and_transfers(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, checkpoint, identities, time_scale=0.5) as world:
        prompts = [[n] * 300 for n in range(1, 4)] + [[n] * 100 for n in range(1, 4)]
        asked = [asyncio.create_task(world.complete(prompt, max_tokens=1000)) for prompt in prompts]
        await until(lambda: world.instance("prfaas-0").counts.prompt_tokens)
        await until(lambda: any(world.instance(n).counts.prompt_tokens for n in PD_ENGINES))
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(world.is_quiet)
        assert all(instance.scheduler.kv_used_bytes == 0 for instance in world.instances)


async def test_without_its_pool_node_an_engine_computes_everything(world: World) -> None:
    right = await world.text(SHORT)
    world.forget()
    await world.sites["pd-pool"].kill()
    tiers = [world.instance(name).tier for name in PD_ENGINES]
    await until(lambda: not any(tier is None or tier.is_connected for tier in tiers))
    assert await world.text(SHORT) == right
    del world.sites["pd-pool"]


async def test_a_conversation_stays_with_the_engine_that_has_it(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    places = {n: (f"ipc://{tmp_path}/{n}.e", f"ipc://{tmp_path}/{n}.r") for n in PD_ENGINES}
    async with running(tmp_path, checkpoint, identities, kv_events=places) as world:
        takers, prompt = [], list(SHORT)
        for turn in range(4):
            await world.complete(prompt, max_tokens=1)
            record = await world.record()
            assert record["path"] == "local"
            takers.append(str(record["decode_engine"]))
            hits = await heard_of(world, prompt, takers[0])
            assert hits == (hits[0], hits[0], 0)
            prompt += [200 + turn] * 40
        # It has nothing to load, though its pool has everything, and the other is as idle.
        counts = world.instance(takers[0]).counts
        assert takers == [takers[0]] * 4
        assert (counts.hit_tokens, counts.external_hit_tokens) == (96 + 128 + 176, 0)
        [other] = set(PD_ENGINES) - {takers[0]}
        assert world.instance(other).counts.prompt_tokens == 0


async def heard_of(world: World, prompt: list[int], taker: str) -> tuple[int, int, int]:
    """What pool, taker and the other hold of a prompt, once the gateway knows that two have it."""
    length = (len(prompt) - 1) // SPAN * SPAN
    [other] = set(PD_ENGINES) - {taker}
    while True:
        async with world.http.post(f"{world.url}/kv/lookup", json={"prompt": prompt}) as reply:
            home = (await reply.json())["clusters"][1]
        hits = {each["name"]: each["hit_tokens"] for each in (*home["pools"], *home["engines"])}
        if hits["pd-pool"] == length and length in (hits[taker], hits[other]):
            return hits["pd-pool"], hits[taker], hits[other]


async def held_away(world: World, prompt: list[int]) -> int:
    """Tokens of a prompt that the gateway knows the engine of the PrfaaS cluster to hold."""
    async with world.http.post(f"{world.url}/kv/lookup", json={"prompt": prompt}) as reply:
        away = (await reply.json())["clusters"][0]
    return max(int(engine["hit_tokens"]) for engine in away["engines"])


async def test_what_only_an_engine_away_holds_is_handed_over_all_the_same(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    places = {"prfaas-0": (f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")}
    async with running(tmp_path, checkpoint, identities, kv_events=places) as world:
        await world.complete(LONG)
        await until(world.is_quiet)
        for name in PD_ENGINES:
            world.instance(name).cache.clear()
        for site in world.sites.values():
            for block in list(site.node.store.names()):
                site.node.store.discard(*block)
        index = world.gateway.index
        await until(lambda: not index.num_blocks("pd-pool") + index.num_blocks("prfaas-pool"))
        prompt = LONG + [7] * 40
        while await held_away(world, prompt) < 288:
            pass
        reply = await world.complete(prompt)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert (record["pd_hit_tokens"], record["prfaas_hit_tokens"]) == (0, 288)
        assert world.instance("prfaas-0").counts.hit_tokens == 288
        # Nothing is left to compute where it is decoded.
        found = sum(world.instance(name).counts.external_hit_tokens for name in PD_ENGINES)
        assert found == 288 + 336
        assert reply["choices"][0]["text"] == await alone(checkpoint, tmp_path, prompt)
