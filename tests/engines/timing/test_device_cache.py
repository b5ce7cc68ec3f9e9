"""The prefix cache of a timing engine: its events add up to its content."""

from __future__ import annotations

import random

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.engines.timing.blocks import CLEAN
from prfaas.engines.timing.device_cache import DeviceCache
from prfaas.engines.timing.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Events

SPAN = 16
ATTENTION = CacheGroup(0, GroupKind.FULL_ATTENTION, SPAN, 1024)
STATE = CacheGroup(1, GroupKind.LINEAR_STATE, SPAN, 1024)
LAYOUT = Layout(b"L" * 32, SPAN, "0", (ATTENTION, STATE))


class Listener(Events):
    """Follows the blocks of a cache by its events."""

    wanted = True

    def __init__(self) -> None:
        self.held: set[tuple[int | None, bytes]] = set()

    def add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            return
        named = {(event.group_idx, each) for each in event.block_hashes}
        if isinstance(event, BlockStored):
            self.held |= named
        else:
            self.held -= named


def test_events_add_up_to_the_content_of_a_full_cache() -> None:
    listener, chance = Listener(), random.Random(16)
    cache = DeviceCache(LAYOUT, 24, listener)
    for _ in range(300):
        tokens = [chance.randrange(6), *range(SPAN * chance.randrange(1, 9) - 1)]
        hashes = hash_chain(tokens, tokens_per_hash=SPAN, seed="0", cache_salt=None)
        cache.store(hashes, tokens, len(tokens), CLEAN, None)
        held = {
            (group, block_hash)
            for number, block_hash in cache._hash_of.items()
            for group, key in ((0, number), (1, ~number))
            if cache._cache.holds(key)
        }
        assert listener.held == held
        assert len(held) == cache._cache.used_blocks
