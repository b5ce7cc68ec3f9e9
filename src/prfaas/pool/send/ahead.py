"""Blocks that were asked for before an engine has stored them: each is sent once it is stored.

An engine that takes no orders pushes nothing. A gateway then has the blocks pulled from the start
of the prefill on (`Pull.ahead`), and reports when the engine has answered. Engines such as SGLang
store behind their answer, so the source waits a little longer for what is still missing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prfaas.core.kv.blocks import BlockKey, BlockName

SETTLE_S = 2.0
"""Once its engine has answered, the longest wait for a block since the one before was stored."""


class StoreWaits:
    """Waits for blocks that engines store."""

    def __init__(self) -> None:
        self._waiting: dict[BlockName, list[asyncio.Event]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def stored(self, layout_id: bytes, keys: Iterable[BlockKey]) -> None:
        """Wake all that wait for one of these."""
        if self._waiting:
            for key in keys:
                for event in self._waiting.get((layout_id, key), ()):
                    event.set()

    @contextmanager
    def watched(self, names: Iterable[BlockName], event: asyncio.Event) -> Iterator[None]:
        """Have an event set when one of these blocks is stored."""
        kept = list(names)
        for name in kept:
            self._waiting.setdefault(name, []).append(event)
        try:
            yield
        finally:
            for name in kept:
                self._waiting[name].remove(event)
                if not self._waiting[name]:
                    del self._waiting[name]


class AwaitedBlocks:
    """The blocks that one transfer waits for.

    Engines store the blocks of a group in the order of the prompt. So the first one of each group
    is waited for.

    Args:
        keys: In the order of the prompt in each group.
    """

    def __init__(self, keys: Iterable[BlockKey]) -> None:
        self._queues: dict[int, deque[BlockKey]] = defaultdict(deque)
        for key in keys:
            self._queues[key.group].append(key)
        self.changed = asyncio.Event()
        """Set when a block was stored, the engine has answered, or the transfer has ended."""
        self._is_computed, self._waits_since_s = False, 0.0

    def computed(self) -> None:
        """The engine has answered: what is not stored soon never is."""
        self._is_computed, self._waits_since_s = True, asyncio.get_running_loop().time()
        self.changed.set()

    def heads(self) -> list[BlockKey]:
        """The first block of each group."""
        return [queue[0] for queue in self._queues.values() if queue]

    def rest(self) -> list[BlockKey]:
        """All that were not sent."""
        return [key for queue in self._queues.values() for key in queue]

    def sent(self, key: BlockKey) -> None:
        """The first block of a group is sent."""
        self._queues[key.group].popleft()
        self._waits_since_s = asyncio.get_running_loop().time()

    def left_s(self) -> float | None:
        """Time until the others count as missing, seconds; None while the engine computes."""
        if not self._is_computed:
            return None
        return max(0.0, self._waits_since_s + SETTLE_S - asyncio.get_running_loop().time())
