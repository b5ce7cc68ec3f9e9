"""A prefix cache with a limit: least recently used blocks, and checkpoints of linear state.

Blocks of full attention are named by ids that are chained over the prompt, so any leading run of
them is a hit. A model with linear layers can resume only where a checkpoint of its state lies: the
usable hit is then the longest run that ends at a checkpoint. Both live in one least-recently-used
order and share one limit.

Of one prompt the last block is the first to be evicted: a prefix outlives what follows it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import repeat


class PrefixCache:
    """Block ids and checkpoints, least recently used first.

    Args:
        capacity_blocks: Capacity, in blocks of full attention; None for no limit, else at least 1.
        checkpoint_blocks: Size of one checkpoint, in blocks; 0 means that the model has no
            linear state and every leading run is usable.
        on_evict: Called with the key of everything that is evicted: a block's id, or the
            complement of the id after which a checkpoint lay.

    Raises:
        ValueError: A limit is out of range.
    """

    def __init__(
        self,
        capacity_blocks: int | None = None,
        checkpoint_blocks: int = 0,
        on_evict: Callable[[int], None] | None = None,
    ) -> None:
        if capacity_blocks is not None and capacity_blocks < 1:
            raise ValueError(f"capacity_blocks is {capacity_blocks}; it has to be at least 1")
        if checkpoint_blocks < 0:
            raise ValueError(f"checkpoint_blocks is {checkpoint_blocks}; it has to be 0 or more")
        self._capacity = capacity_blocks
        self._checkpoint_blocks = checkpoint_blocks
        # Checkpoints are kept under the complement of their block's id, which is negative.
        self._held: OrderedDict[int, None] = OrderedDict()
        self._used = 0
        self._on_evict = on_evict

    @property
    def used_blocks(self) -> int:
        """Blocks in use; never more than the capacity."""
        return self._used

    def leading_run(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that are held. Changes nothing."""
        held = self._held
        for count, block in enumerate(block_ids):
            if block not in held:
                return count
        return len(block_ids)

    def usable_hit(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that a prefill can resume after. Changes nothing."""
        run = self.leading_run(block_ids)
        if not self._checkpoint_blocks:
            return run
        while run and ~block_ids[run - 1] not in self._held:
            run -= 1
        return run

    def store(self, block_ids: Sequence[int], checkpoint_at: int | None = None) -> None:
        """Hold the blocks of a prompt, now the most recently used.

        Args:
            block_ids: Ids from the start of the prompt, each at least 0.
            checkpoint_at: Number of leading blocks after which the linear state was kept; None is
                the end of `block_ids`.
        """
        end = len(block_ids) if checkpoint_at is None else checkpoint_at
        if self._checkpoint_blocks and end:
            self._hold(block_ids[end:], 1)
            self._hold((~block_ids[end - 1],), self._checkpoint_blocks)
            block_ids = block_ids[:end]
        self._hold(block_ids, 1)
        self._evict()

    def touch(self, block_ids: Sequence[int], num_used: int) -> None:
        """Note that the first `num_used` blocks served a hit."""
        held, renew = self._held, self._held.move_to_end
        if self._checkpoint_blocks and num_used and ~block_ids[num_used - 1] in held:
            renew(~block_ids[num_used - 1])
        used = block_ids if num_used == len(block_ids) else block_ids[:num_used]
        for key in reversed(used):
            if key in held:
                renew(key)

    def demote(self, block_ids: Sequence[int]) -> None:
        """Make blocks the next ones to be evicted, the last one first."""
        for key in block_ids:
            if key in self._held:
                self._held.move_to_end(key, last=False)

    def clear(self) -> None:
        """Lose everything, as when a host restarts."""
        self._held.clear()
        self._used = 0

    def holds(self, key: int) -> bool:
        """Return True if a block is held, or under the complement of its id its checkpoint."""
        return key in self._held

    def accept(self, key: int) -> None:
        """Hold one block or checkpoint, now the most recently used."""
        self._hold((key,), self._room(key))
        self._evict()

    def discard(self, key: int) -> None:
        """Drop one block or checkpoint without a call of `on_evict`."""
        if key in self._held:
            del self._held[key]
            self._used -= self._room(key)

    def _hold(self, keys: Sequence[int], room: int) -> None:
        """Hold each key, the last one first: the simulator spends most of its time here."""
        held = self._held
        renew, before = held.move_to_end, len(held)
        for key in reversed(keys):
            if key in held:
                renew(key)
            else:
                held[key] = None
        self._used += room * (len(held) - before)

    def _evict(self) -> None:
        capacity, used, on_evict = self._capacity, self._used, self._on_evict
        if capacity is None or used <= capacity:
            return
        pop = self._held.popitem
        if on_evict is None and not self._checkpoint_blocks:
            deque(map(pop, repeat(False, used - capacity)), maxlen=0)
            self._used = capacity
            return
        while used > capacity:
            key, _ = pop(False)
            used -= 1 if key >= 0 else self._checkpoint_blocks
            if on_evict is not None:
                on_evict(key)
        self._used = used

    def _room(self, key: int) -> int:
        return 1 if key >= 0 else self._checkpoint_blocks
