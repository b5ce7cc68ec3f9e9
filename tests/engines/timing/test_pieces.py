"""Answers, blocks, rows and the cache of the timing engine, each by itself."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.engines.timing.blocks import DrawnAnswer, NewBlock, Rows, block_bytes, stained
from prfaas.engines.timing.device_cache import DeviceCache
from prfaas.engines.timing.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Events
from prfaas.errors import ConfigError

LAYOUT = Layout(
    b"T" * 32,
    16,
    "0",
    (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1000),
        CacheGroup(1, GroupKind.LINEAR_STATE, 16, 1500),
    ),
)
SPOKEN = list(range(50))
KEY = BlockKey(0, b"k" * 32)


# Content


def test_an_answer_goes_on_from_what_was_said() -> None:
    prompt = [5, 6, 7]
    answer = DrawnAnswer(prompt)
    said = [answer.next(SPOKEN) for _ in range(20)]
    rest = DrawnAnswer(prompt + said[:8])
    assert [rest.next(SPOKEN) for _ in range(12)] == said[8:]
    assert len(set(said)) > 5


def test_every_token_and_every_stain_changes_the_answer() -> None:
    def said(answer: DrawnAnswer) -> list[int]:
        return [answer.next(SPOKEN) for _ in range(20)]

    one = said(DrawnAnswer([1, 2, 3]))
    assert one == said(DrawnAnswer([1, 2, 3]))
    stain = stained(b"", b"wrong")
    others = [
        DrawnAnswer([1, 2, 4]),
        DrawnAnswer([1, 2, 3], stain),
        DrawnAnswer([1, 2, 3], choice=1),
    ]
    assert all(said(other) != one for other in others)


def test_bytes_follow_from_name_and_stain() -> None:
    assert block_bytes(KEY, 100) == block_bytes(KEY, 5000)[:100]
    others = [BlockKey(1, KEY.block_hash), BlockKey(0, b"l" * 32)]
    assert all(block_bytes(other, 100) != block_bytes(KEY, 100) for other in others)
    assert block_bytes(KEY, 100, b"stain") != block_bytes(KEY, 100)


# Rows


async def test_rows_go_to_who_asked_first() -> None:
    rows = Rows("rows", LAYOUT, 1500 * 4)
    try:
        first = await rows.take(3)
        second, third = asyncio.ensure_future(rows.take(2)), asyncio.ensure_future(rows.take(1))
        await asyncio.sleep(0)
        assert not third.done()
        rows.give(first)
        assert len(await second) == 2
        assert len(await third) == 1
        waiting = asyncio.ensure_future(rows.take(4))
        await asyncio.sleep(0)
        waiting.cancel()
        rows.give(second.result() + third.result())
        assert rows.num_free == 4
    finally:
        rows.close()


async def test_a_row_is_taken_without_a_copy_of_all_that_are_free() -> None:
    rows = Rows("rows", LAYOUT, 1500 * 100_000)
    tracemalloc.start()
    try:
        taken = [await rows.take(3) for _ in range(10)]
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()
        rows.close()
    assert len({row for three in taken for row in three}) == 30


async def test_a_row_holds_a_block() -> None:
    rows = Rows("rows", LAYOUT, 1500 * 4)
    try:
        rows.fill([2], [NewBlock(KEY, 16, b"stain")])
        assert rows.blocks([2], [KEY]) == [(KEY, block_bytes(KEY, 1000, b"stain"))]
    finally:
        rows.close()


def test_memory_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes_scale"):
        Rows("rows", LAYOUT, 1000)


# Prefix cache


class Heard(Events):
    wanted = True

    def __init__(self) -> None:
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        self.events.append(event)


def chain(tokens: list[int]) -> list[bytes]:
    return hash_chain(tokens, tokens_per_hash=16, seed="0", cache_salt=None)


def test_a_hit_ends_where_state_was_kept() -> None:
    cache, tokens = DeviceCache(LAYOUT, 100, Events()), list(range(64))
    cache.store(chain(tokens), tokens, 48, b"", None)
    other = tokens[:40] + [9] * 24
    assert cache.hit_tokens(chain(tokens), 48) == 48
    assert cache.hit_tokens(chain(tokens), 32) == 0
    assert (cache.hit_tokens(chain(other), 48), cache.held_tokens(chain(other), 48)) == (0, 32)


def test_what_a_stained_sequence_left_stains_who_uses_it() -> None:
    cache, tokens = DeviceCache(LAYOUT, 100, Events()), list(range(64))
    cache.store(chain(tokens), tokens, 32, b"", None)
    cache.store(chain(tokens), tokens, 64, b"stain", None)
    assert cache.use(chain(tokens), 32) == b""
    assert cache.use(chain(tokens), 64) != b""
    cache.clear()
    cache.store(chain(tokens), tokens, 64, b"", None)
    assert cache.use(chain(tokens), 64) == b""


def test_events_add_up_to_what_is_held() -> None:
    heard = Heard()
    cache = DeviceCache(LAYOUT, 10, heard)
    held: dict[tuple[int | None, bytes], None] = {}
    for start in range(0, 600, 60):
        tokens = list(range(start, start + 64))
        cache.store(chain(tokens), tokens, 64, b"", "salt")
        for event in heard.events:
            assert not isinstance(event, AllBlocksCleared)
            names = {(event.group_idx, block): None for block in event.block_hashes}
            if isinstance(event, BlockStored):
                assert not names.keys() & held.keys()
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                held |= names
            else:
                for name in names:
                    del held[name]
        heard.events.clear()
        blocks = sum(group == 0 for group, _ in held)
        states = sum(group == 1 for group, _ in held)
        assert blocks + states * 2 <= 10
        assert cache.hit_tokens(chain(tokens), 64) == 64
    cache.clear()
    assert isinstance(heard.events[-1], AllBlocksCleared)
