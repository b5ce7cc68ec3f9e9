"""Comparison of received blocks with versions that a local engine has computed.

A gateway that verifies a transfer has its prompt computed again by an engine of this pool, under
another salt and so under other names. Both versions are here then. The computed version of a block
is dropped once it was compared: no request has its names.

Blocks are compared one at a time, in parts (`core/kv/difference.py`). The answer names the
sender of each altered block, since another pool than the one that is verified may have sent it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from prfaas.core.cache.keep_rules import EVERY, Origin
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.difference_limits import DIFFERENT, is_altered
from prfaas.extras import is_installed
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.tasks import cancel_all
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.comparing import ALTERED_MAX, Altered, Compare, Compared
from prfaas.wire.messages.fields import keys_of

RUNNING_MAX = 16
"""Comparisons at a time; further ones find no block."""


class Comparing:
    """The comparisons of one pool node.

    Args:
        layouts: Dtype planes of blocks.
    """

    def __init__(self, store: BlockStore, layouts: KnownLayouts) -> None:
        self._store, self._layouts = store, layouts
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        self._has_numpy = is_installed("numpy")

    def asked(self, message: Compare, _: str, answer: Callable[[Message], None]) -> None:
        """Compare, and answer when it is done; without numpy, answer that no block is here."""
        if not self._has_numpy or len(self._tasks) >= RUNNING_MAX:
            answer(_Answer().message(message.job, range(len(message.pairs))))
            return
        task = asyncio.create_task(self._compare(message, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Break off."""
        await cancel_all(self._tasks)

    async def _compare(self, message: Compare, answer: Callable[[Message], None]) -> None:
        found, missing = _Answer(), []
        for place, pair in enumerate(message.pairs):
            received, computed = keys_of(list(pair))
            async with self._turn:
                result = await self._pair(message.layout_id, received, computed)
            if result is None:
                missing.append(place)
                continue
            found.add(place, *result, message.limits)
            self._store.discard(message.layout_id, computed)
        answer(found.message(message.job, missing))

    async def _pair(
        self, layout_id: bytes, received: BlockKey, computed: BlockKey
    ) -> tuple[dict[str, float], Origin] | None:
        """Differences of two versions, and the origin of the first; None if one is missing."""
        from prfaas.core.kv.difference import differences

        pinned: list[StoredBlock] = []
        group = self._layouts.group(layout_id, received.group)
        try:
            for key in (received, computed):
                block = await self._store.fetch(layout_id, key)
                if block is None:
                    return None
                block.pins += 1
                pinned.append(block)
            ours, theirs = (memoryview(block.data) for block in pinned)
            planes = () if group is None else group.planes
            found = await asyncio.to_thread(differences, ours, theirs, planes)
        finally:
            for block in pinned:
                block.pins -= 1
        capped = {name: min(value, DIFFERENT * 1e6) for name, value in found.items()}
        return capped, pinned[0].origin


class _Answer:
    """Findings of a comparison so far."""

    def __init__(self) -> None:
        self._num_equal = self._num_different = 0
        self._worst: dict[str, float] = {}
        self._altered: list[Altered] = []

    def add(
        self, place: int, found: dict[str, float], origin: Origin, limits: Mapping[str, float]
    ) -> None:
        """Add a pair."""
        is_equal = not any(found.values())
        self._num_equal += is_equal
        self._num_different += not is_equal
        for name, value in found.items():
            self._worst[name] = max(self._worst.get(name, 0.0), value)
        if len(self._altered) < ALTERED_MAX and is_altered(found, limits):
            self._altered.append(Altered(place, origin.sender, EVERY in origin.sources))

    def message(self, job: int, missing: Sequence[int]) -> Compared:
        """The message, with the places of pairs that are not here."""
        return Compared(
            job=job,
            num_equal=self._num_equal,
            num_different=self._num_different,
            num_missing=len(missing),
            worst=self._worst,
            altered=self._altered,
            missing=list(missing),
        )
