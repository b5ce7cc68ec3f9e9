"""A PrfaaS pool brings wrong blocks under right names: a purge leaves nothing of them.

The engine shows a wrong block as a wrong answer, and so does all that is computed after it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.engines.orders import PushOrder
from prfaas.engines.timing import tier
from prfaas.engines.timing.blocks import NewBlock
from prfaas.engines.timing.instance import PromptWork, TimedInstance
from prfaas.pool.store.origins import LOCAL
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest
from prfaas.wire.messages.engine import Store, StoreDone
from tests.pool.sites import Site, until

from .deployment import LONG, World, alone, running

pytestmark = pytest.mark.timeout(180)
PROMPTS = [[number, *LONG] for number in range(4)]
FOLLOW_UPS = [[*prompt, *range(60)] for prompt in PROMPTS]
"""What is new in them is computed at home, after blocks that came from away."""


def alter(site: Site) -> None:
    """Have a pool node change a byte of every block it keeps, and digest it afterwards."""
    store = site.node.store
    keep = store.keep

    def altered(
        layout_id: bytes,
        key: BlockKey,
        buffer: bytearray | memoryview,
        digest: bytes,
        origin: Origin = LOCAL,
    ) -> StoredBlock | None:
        buffer[0] ^= 1
        return keep(layout_id, key, buffer, block_digest(layout_id, key, buffer), origin)

    store.keep = altered  # type: ignore[method-assign]


def repair(site: Site) -> None:
    """The honest pool is back, with nothing in it."""
    store = site.node.store
    del store.keep
    store.drop(store.in_memory())


async def reset_engines(world: World) -> None:
    """Reset the engines as an operator does by hand."""
    for engine in world.gateway.engines.by_name.values():
        async with world.http.post(f"{engine.url}/reset_prefix_cache") as reply:
            assert reply.status == 200


async def num_wrong(world: World, right: dict[int, str]) -> int:
    asked = [*PROMPTS, *FOLLOW_UPS]
    answers = [await world.text(prompt) for prompt in asked]
    await until(world.is_quiet)
    return sum(answer != right[number] for number, answer in enumerate(answers))


async def purge(world: World, **body: Any) -> dict[str, Any]:
    asked = {"source": "prfaas-pool", **body}
    async with world.http.post(f"{world.url}/control/purge", json=asked) as reply:
        answer: dict[str, Any] = await reply.json()
        assert reply.status == 200, answer
        return answer


async def answers_alone(checkpoint: Path, directory: Path) -> dict[int, str]:
    asked = [*PROMPTS, *FOLLOW_UPS]
    return {number: await alone(checkpoint, directory, p) for number, p in enumerate(asked)}


async def test_after_a_purge_no_answer_is_wrong(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    right = await answers_alone(checkpoint, tmp_path)
    async with running(tmp_path, checkpoint, identities) as world:
        alter(world.sites["prfaas-pool"])
        assert await num_wrong(world, right) == len(right)
        repair(world.sites["prfaas-pool"])
        await reset_engines(world)
        # Nothing but the pool at home is left of it, and that is enough.
        assert await num_wrong(world, right) == len(right)

        counted = await purge(world, dry_run=True)
        assert counted["is_complete"]
        assert await num_wrong(world, right) == len(right)
        report = await purge(world)
        assert report["is_complete"]
        amounts = {pool["name"]: pool["num_blocks"] for pool in report["pools"]}
        assert (
            amounts["pd-pool"] >= {p["name"]: p["num_blocks"] for p in counted["pools"]}["pd-pool"]
        )
        assert amounts["pd-pool"] > 0
        assert [engine["problem"] for engine in report["engines"]] == [""] * 3
        assert world.sites["pd-pool"].held() == set()
        index = world.gateway.index
        await until(lambda: not index.num_blocks("pd-pool"))
        assert await num_wrong(world, right) == 0
        entry = world.gateway.journal.latest(1)[0]
        assert (entry.action, entry.what) == ("purge", "source prfaas-pool")
        assert entry.numbers["not_done"] == 0


async def test_a_purge_of_a_tenant_leaves_nothing_in_pools_and_index(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with running(tmp_path, checkpoint, identities) as world:
        answers = [await world.text(prompt) for prompt in PROMPTS]
        await until(world.is_quiet)
        assert all(site.held() for site in world.sites.values())
        body = {"tenant": "default"}
        async with world.http.post(f"{world.url}/control/purge", json=body) as reply:
            report = await reply.json()
        assert report["is_complete"], report
        assert {pool["name"] for pool in report["pools"] if pool["num_blocks"]} == set(world.sites)
        assert [site.held() for site in world.sites.values()] == [set()] * len(world.sites)
        index = world.gateway.index
        await until(lambda: not any(index.num_blocks(pool) for pool in world.sites))
        assert [await world.text(prompt) for prompt in PROMPTS] == answers


async def test_what_did_not_come_from_there_outlives_a_purge(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    short = list(range(200, 300))
    async with running(tmp_path, checkpoint, identities) as world:
        await world.text(PROMPTS[0])
        await world.text(short)
        await until(world.is_quiet)
        before = world.sites["pd-pool"].held()
        report = await purge(world)
        kept = world.sites["pd-pool"].held()
        assert report["is_complete"]
        assert kept
        assert len(before) - len(kept) == report["pools"][0]["num_blocks"] > 0
        await world.text([*short, 1])
        assert (await world.record())["cached_tokens"] >= 96


async def test_requests_under_way_bring_nothing_back(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """Purged in the middle of a crowd: whatever was being loaded, computed or stored."""
    right = await answers_alone(checkpoint, tmp_path)
    async with running(tmp_path, checkpoint, identities, time_scale=0.02) as world:
        alter(world.sites["prfaas-pool"])
        asked = [*PROMPTS, *FOLLOW_UPS] * 3
        crowd = [asyncio.create_task(world.complete(p, max_tokens=40)) for p in asked]
        loaded = [world.instance(name).counts for name in ("pd-0", "pd-1")]
        await until(lambda: sum(count.stained for count in loaded) >= 2)
        repair(world.sites["prfaas-pool"])
        report = await purge(world)
        assert report["is_complete"], report
        await asyncio.gather(*crowd)
        await until(world.is_quiet)
        assert await num_wrong(world, right) == 0


async def test_a_prefix_that_was_forgotten_before_its_push_is_not_stored_as_clean() -> None:
    layout = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),))
    instance = object.__new__(TimedInstance)
    instance.layout, instance._span = layout, 16
    stored: list[object] = []
    work = PromptWork("one", [1] * 48, 1, order=PushOrder("ab" * 16, "pd-pool", final_tokens=48))
    work.hashes = [bytes([n]) * 32 for n in range(3)]
    is_forgotten = False

    async def lacking(_: str, keys: list[BlockKey]) -> set[BlockKey]:
        work.is_void = is_forgotten
        return set(keys)

    instance.tier = cast(
        "Any",
        SimpleNamespace(
            is_connected=True, lacking=lacking, store=lambda *about: stored.append(about)
        ),
    )
    await instance._push_own(work, 48)
    assert len(stored) == 1
    is_forgotten = True
    await instance._push_own(work, 48)
    assert len(stored) == 1


class _Pool:
    """Takes what an instance sends, and answers when it is told to."""

    def __init__(self, *about: Any) -> None:
        self.sent: list[Any] = []
        self.is_connected = True

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def close(self) -> None:
        pass

    def stores(self) -> list[Store]:
        return [message for message in self.sent if isinstance(message, Store)]


async def test_stores_that_wait_do_not_outlive_a_purge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the source are sent and answered, or never sent after the reset of the engine."""
    monkeypatch.setattr(tier, "PoolConnection", _Pool)
    layout = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),))
    ours = tier.TimingTier("pd-0", layout, Path("nowhere"), 64 * 1024, {})
    pool = cast("_Pool", ours._client)
    keys = [BlockKey(0, number.to_bytes(32, "big")) for number in range(101)]
    ours.lineage.loaded([keys[0].block_hash], ["prfaas-pool"])

    def store(request: str, first: int, last: int) -> None:
        blocks = [NewBlock(key, 16, b"") for key in keys[first:last]]
        ours.store(request, blocks, [key.block_hash for key in keys[first:last]], None)

    store("of it", 0, 100)
    # The rows are taken: the rest waits.
    await until(lambda: sum(len(message.keys) for message in pool.stores()) == ours.rows.num_rows)
    sent = pool.stores()
    forgetting = asyncio.create_task(ours.forget())
    store("clean", 100, 101)
    await asyncio.sleep(0)
    assert not forgetting.done()
    for message in sent:
        assert message.sources == ["prfaas-pool"]
        ours._requests.on_message(StoreDone(job=message.job, stored=True))
    ours._take_done()
    await forgetting
    await until(lambda: len(pool.stores()) > len(sent))
    assert [(m.keys, m.sources) for m in pool.stores()[len(sent) :]] == [([keys[100]], [])]
    await ours.close()
