"""Comparison of received blocks with versions that a local engine has computed.

A gateway that verifies a transfer has its prompt computed again by an engine of this pool, under
another salt and so under other names. Both versions are here then. The computed version is dropped
afterwards: no request has its names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prfaas.core.integrity.difference import DIFFERENT, differences
from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.codec.layouts import KnownLayouts
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.tasks import cancel_all
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.comparing import Compare, Compared
from prfaas.wire.messages.fields import keys_of

RUNNING_MAX = 16
"""Comparisons at a time; further ones find no block."""


class Comparing:
    """The comparisons of one pool node.

    Args:
        store: Has both versions.
        layouts: Dtype planes of blocks.
    """

    def __init__(self, store: BlockStore, layouts: KnownLayouts) -> None:
        self._store, self._layouts = store, layouts
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, message: Compare, answer: Callable[[Message], None]) -> None:
        """Compare, and answer when it is done."""
        if len(self._tasks) >= RUNNING_MAX:
            missing = len(message.pairs)
            answer(
                Compared(
                    job=message.job, num_equal=0, num_different=0, num_missing=missing, worst={}
                )
            )
            return
        task = asyncio.create_task(self._compare(message, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Break off."""
        await cancel_all(self._tasks)

    async def _compare(self, message: Compare, answer: Callable[[Message], None]) -> None:
        worst: dict[str, float] = {}
        num_equal = num_different = num_missing = 0
        for received, computed in message.pairs:
            first, second = keys_of([received, computed])
            found = await self._pair(message.layout_id, first, second)
            if found is None:
                num_missing += 1
                continue
            is_equal = not any(found.values())
            num_equal, num_different = num_equal + is_equal, num_different + (not is_equal)
            worst |= {name: max(worst.get(name, 0.0), value) for name, value in found.items()}
        if not num_missing:
            for _, computed in message.pairs:
                self._store.discard(message.layout_id, keys_of([computed])[0])
        answer(
            Compared(
                job=message.job,
                num_equal=num_equal,
                num_different=num_different,
                num_missing=num_missing,
                worst=worst,
            )
        )

    async def _pair(
        self, layout_id: bytes, received: BlockKey, computed: BlockKey
    ) -> dict[str, float] | None:
        """Differences of two versions; None if one is missing."""
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
        return {name: min(value, DIFFERENT * 1e6) for name, value in found.items()}
