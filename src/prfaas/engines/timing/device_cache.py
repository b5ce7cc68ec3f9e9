"""The prefix cache of an instance: which blocks it holds, and which of them are stained."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.core.kv.blocks import GroupKind, Layout
from prfaas.engines.timing.blocks import CLEAN, stained
from prfaas.engines.timing.kv_events import BlockRemoved, BlockStored, Events

ID_BYTES = 8


class DeviceCache:
    """Blocks by their hash, least recently used first out.

    Args:
        events: Observer of added and removed blocks.
    """

    def __init__(self, layout: Layout, capacity_blocks: int, events: Events) -> None:
        self._layout, self._events = layout, events
        self._span = layout.boundary_tokens
        state = sum(g.block_bytes for g in layout.groups if g.kind is GroupKind.LINEAR_STATE)
        attention = sum(g.block_bytes for g in layout.groups) - state
        self._checkpoint_blocks = -(-state // max(attention, 1))
        self._capacity = max(capacity_blocks, self._checkpoint_blocks + 1)
        self._stains: dict[int, bytes] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evicted: list[int] = []
        self._cache = self._empty()

    def _empty(self) -> PrefixCache:
        return PrefixCache(self._capacity, self._checkpoint_blocks, self._evicted.append)

    def held_tokens(self, hashes: Sequence[bytes], last_boundary: int) -> int:
        """Leading tokens with cached attention blocks."""
        return self._cache.leading_run(self._ids(hashes, last_boundary)) * self._span

    def hit_tokens(self, hashes: Sequence[bytes], last_boundary: int) -> int:
        """Prefix that a prefill can resume after."""
        return self._cache.usable_hit(self._ids(hashes, last_boundary)) * self._span

    def use(self, hashes: Sequence[bytes], hit_tokens: int) -> bytes:
        """A sequence resumes after `hit_tokens`; returns the stain of its blocks."""
        ids = self._ids(hashes, hit_tokens)
        self._cache.touch(ids, len(ids))
        stain = CLEAN
        if self._stains:
            for number in ids:
                if number in self._stains:
                    stain = stained(stain, self._stains[number])
        return stain

    def store(
        self,
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        end_token: int,
        stain: bytes,
        cache_salt: str | None,
    ) -> None:
        """The blocks of a prompt up to `end_token`, a boundary, are there."""
        ids = self._ids(hashes, end_token)
        fresh = [index for index, number in enumerate(ids) if not self._cache.holds(number)]
        fresh_state = bool(self._checkpoint_blocks) and not self._cache.holds(~ids[-1])
        for index in fresh:
            self._hash_of[ids[index]] = hashes[index]
            if stain:
                self._stains[ids[index]] = stain
        if stain and fresh_state:
            self._stains[ids[-1]] = stain
        self._cache.store(ids)
        self._tell_stored(hashes, tokens, fresh, end_token if fresh_state else 0, cache_salt)
        self._tell_removed()

    def clear(self) -> None:
        """Lose everything."""
        self._stains.clear()
        self._hash_of.clear()
        self._cache = self._empty()
        self._events.cleared()

    def _ids(self, hashes: Sequence[bytes], end_token: int) -> list[int]:
        return [
            int.from_bytes(block_hash[:ID_BYTES], "big") >> 1
            for block_hash in hashes[: end_token // self._span]
        ]

    def _tell_stored(
        self,
        hashes: Sequence[bytes],
        tokens: Sequence[int],
        fresh: list[int],
        state_end: int,
        cache_salt: str | None,
    ) -> None:
        if not self._events.wanted:
            return
        for group in self._layout.groups:
            if group.kind is GroupKind.LINEAR_STATE:
                indices = [state_end // self._span - 1] if state_end else []
            else:
                indices = fresh
            for first, last in _runs(indices):
                salted = first == 0 and cache_salt
                self._events.add(
                    BlockStored(
                        block_hashes=list(hashes[first : last + 1]),
                        parent_block_hash=hashes[first - 1] if first else None,
                        token_ids=list(tokens[first * self._span : (last + 1) * self._span]),
                        block_size=self._span,
                        lora_id=None,
                        medium="GPU",
                        lora_name=None,
                        extra_keys=[(cache_salt,), *[None] * (last - first)] if salted else None,
                        group_idx=group.index,
                        kv_cache_spec_kind=_SPEC_KINDS[group.kind],
                        kv_cache_spec_sliding_window=group.window_tokens or None,
                    )
                )

    def _tell_removed(self) -> None:
        for key in self._evicted:
            number, is_state = (~key, True) if key < 0 else (key, False)
            block_hash = self._hash_of.get(number)
            if block_hash is None:
                continue
            for group in self._layout.groups:
                if (group.kind is GroupKind.LINEAR_STATE) == is_state:
                    self._events.add(BlockRemoved([block_hash], "GPU", group.index))
        # A block and its checkpoint may leave together: the hash names both.
        for number in {max(key, ~key) for key in self._evicted}:
            if not self._cache.holds(number) and not self._cache.holds(~number):
                self._hash_of.pop(number, None)
                self._stains.pop(number, None)
        self._evicted.clear()
        self._events.flush()


_SPEC_KINDS = {
    GroupKind.FULL_ATTENTION: "full_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.LINEAR_STATE: "mamba",
}


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, first and last of each."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return runs
