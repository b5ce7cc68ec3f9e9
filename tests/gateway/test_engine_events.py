"""Following engines' KV events over real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.config.deployment import Deployment
from prfaas.core.prefix_index import PrefixIndex, SourceState
from prfaas.gateway.engine_events import (
    BATCH_BYTES_MAX,
    QUEUED_BATCHES_MAX,
    EngineEvents,
    EventTiming,
)
from prfaas.gateway.kv_events import Batch

from .conftest import LAYOUT, until
from .kv_publisher import CLEARED, Publisher, removed, stored

HASHES = [bytes([n]) * 32 for n in range(100)]
PROMPT = 20 * 16 + 1
TIMING = EventTiming(backoff_s=0.01, backoff_max_s=0.05, connect_s=1.0, replay_s=1.0, idle_s=30.0)
EXACT, INCOMPLETE, DEGRADED = SourceState.EXACT, SourceState.INCOMPLETE, SourceState.DEGRADED


@dataclass
class Site:
    """An engine that publishes, and a gateway's index that follows."""

    index: PrefixIndex
    endpoint: str
    replay: str | None
    batches: list[Batch] = field(default_factory=list)
    events: EngineEvents = field(init=False)

    def state(self) -> SourceState:
        return self.index.state("decode")

    def num_blocks(self) -> int:
        return self.index.num_blocks("decode")

    async def reaches(self, state: SourceState, num_blocks: int) -> None:
        await until(lambda: (self.state(), self.num_blocks()) == (state, num_blocks))


def deployment(endpoint: str, replay: str | None) -> Deployment:
    engine: dict[str, Any] = {"pool": "pool", "kv_events": endpoint, "kv_events_replay": replay}
    return Deployment.model_validate(
        {
            "model": {"name": "m", "path": "nowhere"},
            "routing": {"offload_threshold": 100},
            "security": {"identities": "nowhere"},
            "clusters": {
                "pd": {"role": "pd", "pools": {"pool": {}}, "engines": {"decode": engine}}
            },
        }
    )


@asynccontextmanager
async def following(
    directory: Path, *, replays: bool = True, timing: EventTiming = TIMING
) -> AsyncIterator[Site]:
    endpoint = f"ipc://{directory}/events"
    replay = f"ipc://{directory}/replay" if replays else None
    site = Site(PrefixIndex(), endpoint, replay)
    events = EngineEvents(
        deployment(endpoint, replay),
        site.index,
        lambda pool, engine: LAYOUT,
        lambda engine, batch: site.batches.append(batch),
        timing,
    )
    site.events = events
    assert events.names() == ["decode"]
    events.start()
    try:
        yield site
    finally:
        await events.close()


@asynccontextmanager
async def living(site: Site) -> AsyncIterator[Publisher]:
    publisher = Publisher(site.endpoint, site.replay)
    try:
        yield publisher
    finally:
        await publisher.close()


async def test_blocks_come_and_go(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        await site.reaches(EXACT, 0)
        engine.publish(stored(HASHES[:10]), stored(HASHES[:2], 1))
        await site.reaches(EXACT, 12)
        numbers = [int.from_bytes(name[-8:], "big") for name in HASHES[:4]]
        engine.publish(removed(numbers), stored(HASHES[:5], medium="CPU"), {"type": "New"})
        await site.reaches(EXACT, 8)
        engine.publish(CLEARED, stored(HASHES[:3]))
        await site.reaches(EXACT, 3)
        assert sum(batch.num_elsewhere for batch in site.batches) == 1
        assert sum(batch.num_unknown for batch in site.batches) == 1


async def test_a_hit_in_device_memory_is_that_engines(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        engine.publish(stored(HASHES[:20]), stored([HASHES[7]], 1))
        await until(lambda: bool(site.num_blocks()))
        hits = site.index.hits(LAYOUT, HASHES[:20], PROMPT)
        assert hits == ({"decode": 8 * 16}, {})


async def test_what_was_published_before_is_heard(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        for name in HASHES:
            engine.publish(stored([name]), lost=True)
        await site.reaches(EXACT, len(HASHES))


async def test_lost_batches_are_asked_for(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        num_replays = engine.num_replays
        engine.publish(removed(HASHES[:5]), lost=True)
        engine.publish(stored(HASHES[50:51]))
        await site.reaches(EXACT, 6)
        assert engine.num_replays > num_replays


async def test_the_last_batch_can_be_lost(tmp_path: Path) -> None:
    """Nobody says so; the engine is asked after a while."""
    timing = EventTiming(backoff_s=0.01, idle_s=0.05)
    async with following(tmp_path, timing=timing) as site, living(site) as engine:
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(removed(HASHES[:5]), lost=True)
        await site.reaches(EXACT, 5)


async def test_a_gap_without_a_replay_starts_anew(tmp_path: Path) -> None:
    async with following(tmp_path, replays=False) as site, living(site) as engine:
        await until(engine.has_subscriber)
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(removed(HASHES[:5]), lost=True)
        engine.publish(stored(HASHES[20:23]))
        await site.reaches(INCOMPLETE, 3)


async def test_a_replay_that_is_not_answered_starts_anew(tmp_path: Path) -> None:
    timing = EventTiming(backoff_s=0.01, replay_s=0.05)
    async with following(tmp_path, timing=timing) as site, living(site) as engine:
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.is_mute = True
        engine.publish(removed(HASHES[:5]), lost=True)
        engine.publish(stored(HASHES[20:23]))
        await site.reaches(INCOMPLETE, 3)


async def test_an_engine_that_begins_anew_holds_nothing_of_before(tmp_path: Path) -> None:
    async with following(tmp_path) as site:
        async with living(site) as engine:
            engine.publish(stored(HASHES[:10]))
            engine.publish(stored(HASHES[10:20]))
            await site.reaches(EXACT, 20)
        await site.reaches(DEGRADED, 20)
        _, hints = site.index.hits(LAYOUT, HASHES[:20], PROMPT)
        assert hints == {}
        async with living(site) as engine:
            for name in HASHES[50:54]:
                engine.publish(stored([name]), lost=True)
            await site.reaches(EXACT, 4)


async def test_a_batch_that_can_not_be_read_breaks_the_connection(tmp_path: Path) -> None:
    """And is read again: an engine that goes on publishing such is not known."""
    async with following(tmp_path) as site, living(site) as engine:
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(payload=b"\xc1")
        await until(lambda: site.state() is not EXACT)
        engine.batches.clear()
        engine.publish(stored(HASHES[20:23]))
        await site.reaches(INCOMPLETE, 3)


async def test_two_gateways_follow_one_engine(tmp_path: Path) -> None:
    async with following(tmp_path) as one, following(tmp_path) as other, living(one) as engine:
        engine.publish(stored(HASHES[:10]))
        for site in (one, other):
            await site.reaches(EXACT, 10)
        engine.publish(removed(HASHES[:3]))
        for site in (one, other):
            await site.reaches(EXACT, 7)


async def test_nothing_is_left_open(tmp_path: Path) -> None:
    """Closing ends a handshake, a replay and a subscription alike."""
    before = len(asyncio.all_tasks())
    async with following(tmp_path):
        pass
    async with following(tmp_path) as site, living(site) as engine:
        engine.is_mute = True
        await until(lambda: engine.num_replays > 0)
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_events": "tcp://127.0.0.1:5557"}, "in the\n?.*clear"),
        ({"kv_events_replay": "ipc:///r"}, "needs kv_events"),
        ({"kv_events": "udp://x:1", "url": "http://x:1"}, "pattern"),
    ],
)
def test_places_that_may_not_be(settings: dict[str, str], expected: str) -> None:
    tables = deployment("ipc:///e", None).model_dump(mode="python")
    engine = {"pool": "pool"} | settings
    tables["clusters"]["pd"]["engines"]["decode"] = engine
    with pytest.raises(ValueError, match=expected):
        Deployment.model_validate(tables)


# --- an engine that is none ---


def test_what_one_engine_can_have_wait_here_is_bounded() -> None:
    assert QUEUED_BATCHES_MAX * BATCH_BYTES_MAX <= 4 << 30


NEXT = (1).to_bytes(8, "big")


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"\x01", b"\x90"],
        [b"", NEXT, b"\xc1"],
        [b"", NEXT, b"\xdd\xff\xff\xff\xff"],
        [b"", NEXT, b"\x91" * 100_000],
        [b"", NEXT, msgspec.msgpack.encode([0, [stored(list(range(70_000)))], 0])],
        [b"", NEXT, msgspec.msgpack.encode([0, [stored([2**63])], 0])[:-3]],
        [b"", NEXT, bytes(BATCH_BYTES_MAX + 1)],
        [b"x"] * 1000,
    ],
    ids=range(9),
)
async def test_garbage_breaks_the_connection_and_nothing_else(
    tmp_path: Path, frames: list[bytes]
) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine._pub.send_multipart(frames)
        await until(lambda: site.state() is DEGRADED)
        await site.reaches(EXACT, 10)
        engine.publish(stored(HASHES[10:12]))
        await site.reaches(EXACT, 12)


async def test_a_flood_of_gaps_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path, replays=False) as site, living(site) as engine:
        await until(engine.has_subscriber)
        for number in range(100):
            engine.publish(stored([HASHES[number]]))
            engine.publish(lost=True)
        engine.publish(stored(HASHES[:3]))
        await site.reaches(INCOMPLETE, 3)
    assert caplog.text.count("kv_events_gap") == 1


async def test_who_breaks_every_connection_is_asked_less_and_less(tmp_path: Path) -> None:
    timing = replace(TIMING, backoff_s=0.001, backoff_max_s=60.0)
    async with following(tmp_path, timing=timing) as site, living(site) as engine:
        [client] = site.events._clients.values()
        for _ in range(6):
            await until(lambda: site.state() is EXACT)
            engine._pub.send_multipart([b"garbage"])
            await until(lambda: site.state() is not EXACT)
        await until(lambda: client.backoff_s >= 0.032)
