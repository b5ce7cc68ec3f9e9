"""Following engines' KV events over real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from prfaas.config.deployment import Deployment
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.gateway.engines.kv_event_subscriber import (
    BATCH_BYTES_MAX,
    QUEUED_BATCHES_MAX,
    EngineClient,
    EngineEvents,
    EventTiming,
    SubscriptionFault,
    SubscriptionObserver,
)
from prfaas.wire.kv_events import KvEventBatch
from tests.gateway.conftest import LAYOUT, until
from tests.gateway.kv_publisher import CLEARED, Publisher, followed_deployment, removed, stored

HASHES = [bytes([n]) * 32 for n in range(100)]
PROMPT = 20 * 16 + 1
PATIENT_S = 3600.0
"""A wait that no test ends by its length."""
TIMING = EventTiming(
    backoff_s=0.01,
    backoff_max_s=0.05,
    connect_s=PATIENT_S,
    replay_s=PATIENT_S,
    settle_s=PATIENT_S,
    idle_s=PATIENT_S,
)
SETTLING = replace(TIMING, settle_s=0.01)
"""Asks soon, and again and again, whether something was missed."""
EXACT, INCOMPLETE, DEGRADED = SourceState.EXACT, SourceState.INCOMPLETE, SourceState.DEGRADED


@dataclass
class Site(SubscriptionObserver):
    """An engine that publishes, and a gateway's index that follows."""

    index: PrefixIndex
    endpoint: str
    replay: str | None
    batches: list[KvEventBatch] = field(default_factory=list)
    faults: Counter[SubscriptionFault] = field(default_factory=Counter)
    events: EngineEvents = field(init=False)

    def applied(self, engine: str, batch: KvEventBatch) -> None:
        self.batches.append(batch)

    def failed(self, engine: str, fault: SubscriptionFault) -> None:
        self.faults.update([fault])

    def state(self) -> SourceState:
        return self.index.state("decode")

    def num_blocks(self) -> int:
        return self.index.num_blocks("decode")

    def client(self) -> EngineClient:
        [client] = self.events._clients.values()
        return client

    async def reaches(self, state: SourceState, num_blocks: int) -> None:
        await until(lambda: (self.state(), self.num_blocks()) == (state, num_blocks))


@asynccontextmanager
async def following(
    directory: Path, *, replays: bool = True, timing: EventTiming = TIMING
) -> AsyncIterator[Site]:
    endpoint = f"ipc://{directory}/events"
    replay = f"ipc://{directory}/replay" if replays else None
    site = Site(PrefixIndex(), endpoint, replay)
    events = EngineEvents(
        followed_deployment(endpoint, replay),
        site.index,
        lambda pool, engine: LAYOUT,
        site,
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


async def subscribed(engine: Publisher, num: int = 1) -> None:
    """Wait until what `engine` publishes reaches its subscriber, for the `num`th time."""
    await until(lambda: engine.num_subscriptions() >= num)


async def test_blocks_come_and_go(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        await subscribed(engine)
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
        assert not site.faults


async def test_a_hit_in_device_memory_is_that_engines(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        await subscribed(engine)
        engine.publish(stored(HASHES[:20]), stored([HASHES[7]], 1))
        await site.reaches(EXACT, 21)
        hits = site.index.hits(LAYOUT, HASHES[:20], PROMPT)
        assert hits == ({"decode": 8 * 16}, {})


async def test_what_was_published_before_is_heard(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        for name in HASHES:
            engine.publish(stored([name]), lost=True)
        await site.reaches(EXACT, len(HASHES))


async def test_lost_batches_are_asked_for(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        await subscribed(engine)
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(removed(HASHES[:5]), lost=True)
        engine.publish(stored(HASHES[50:51]))
        await site.reaches(EXACT, 6)
        assert site.faults == {SubscriptionFault.GAP: 1}


async def test_the_last_batch_can_be_lost(tmp_path: Path) -> None:
    """Nobody says so; the engine is asked after a while."""
    timing = replace(TIMING, settle_s=0.01, idle_s=0.01)
    async with following(tmp_path, timing=timing) as site, living(site) as engine:
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(removed(HASHES[:5]), lost=True)
        await site.reaches(EXACT, 5)


async def test_a_batch_published_before_the_subscription_took_effect_is_asked_for_soon(
    tmp_path: Path,
) -> None:
    """The replay is over, the publisher does not know of the subscription yet, and no batch follows
    that would show the gap."""
    async with following(tmp_path, timing=SETTLING) as site, living(site) as engine:
        await site.reaches(EXACT, 0)
        engine.publish(stored(HASHES[:10]), lost=True)
        await site.reaches(EXACT, 10)
        assert not site.faults


async def test_a_gap_without_a_replay_starts_anew(tmp_path: Path) -> None:
    async with following(tmp_path, replays=False) as site, living(site) as engine:
        await subscribed(engine)
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(removed(HASHES[:5]), lost=True)
        engine.publish(stored(HASHES[20:23]))
        await site.reaches(INCOMPLETE, 3)


async def test_a_replay_that_is_not_answered_starts_anew(tmp_path: Path) -> None:
    async with following(tmp_path) as site, living(site) as engine:
        await subscribed(engine)
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.is_mute = True
        site.client().timing = replace(TIMING, replay_s=0.01)
        engine.publish(removed(HASHES[:5]), lost=True)
        engine.publish(stored(HASHES[20:23]))
        await site.reaches(INCOMPLETE, 3)
        assert site.faults == {SubscriptionFault.GAP: 1, SubscriptionFault.NOT_REPLAYED: 1}


async def test_an_engine_that_begins_anew_holds_nothing_of_before(tmp_path: Path) -> None:
    async with following(tmp_path) as site:
        async with living(site) as engine:
            await subscribed(engine)
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
        await subscribed(engine)
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.publish(payload=b"\xc1")
        await until(lambda: site.faults[SubscriptionFault.LOST] == 1)
        await subscribed(engine, 3)
        engine.batches.clear()
        engine.publish(stored(HASHES[20:23]), lost=True)
        await site.reaches(INCOMPLETE, 3)


async def test_two_gateways_follow_one_engine(tmp_path: Path) -> None:
    async with following(tmp_path) as one, following(tmp_path) as other, living(one) as engine:
        await subscribed(engine, 2)
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
    tables = followed_deployment("ipc:///e", None).model_dump(mode="python")
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
        await subscribed(engine)
        engine.publish(stored(HASHES[:10]))
        await site.reaches(EXACT, 10)
        engine.send_frames(frames)
        await until(lambda: site.faults[SubscriptionFault.LOST] == 1)
        await subscribed(engine, 2)
        await site.reaches(EXACT, 10)
        engine.publish(stored(HASHES[10:12]))
        await site.reaches(EXACT, 12)
        assert site.faults == {SubscriptionFault.LOST: 1}


async def test_a_flood_of_gaps_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timing = replace(TIMING, gap_logged_every_s=PATIENT_S)
    async with following(tmp_path, timing=timing, replays=False) as site, living(site) as engine:
        await subscribed(engine)
        for number in range(100):
            engine.publish(stored([HASHES[number]]))
            engine.publish(lost=True)
        engine.publish(stored(HASHES[:3]))
        await site.reaches(INCOMPLETE, 3)
    assert caplog.text.count("kv_events_gap") == 1
    assert site.faults == {SubscriptionFault.GAP: 100}


async def test_who_breaks_every_connection_is_asked_less_and_less(tmp_path: Path) -> None:
    timing = replace(TIMING, backoff_s=0.001, backoff_max_s=PATIENT_S)
    async with following(tmp_path, timing=timing) as site, living(site) as engine:
        for number in range(1, 7):
            await subscribed(engine, number)
            await site.reaches(EXACT, 0)
            engine.send_frames([b"garbage"])
            await until(lambda num=number: site.faults[SubscriptionFault.LOST] == num)  # type: ignore[misc]
        await until(lambda: site.client().backoff.next_s >= 0.032)
