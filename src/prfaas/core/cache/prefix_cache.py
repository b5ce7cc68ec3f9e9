"""A prefix cache with a limit: least recently used blocks, and checkpoints of linear state.

Blocks of full attention are named by ids that are chained over the prompt, so any leading run of
them is a hit. A model with linear layers can resume only where a checkpoint of its state lies: the
usable hit is then the longest run that ends at a checkpoint. Both live in one least-recently-used
order and share one limit.

Of one prompt the last block is the first to be evicted: a prefix outlives what follows it.

One that tenants share, with reserves and limits; and one of two tiers: what host memory evicts
spills to disk, what is used is promoted. A block lies in one tier. Of a hit the part on disk has to
be read before prefill can resume, which takes time; the caller decides whether that is worth it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.tenant_shares import Held, Share, TenantShares
from prfaas.core.invariants import require

K = TypeVar("K")
_LISTED_MAX = 4
"""Keys of all uses for each one that is held; with more, those that were used again are dropped."""


@dataclass(slots=True, eq=False)
class _Use:
    """Keys that were used at once. Of the first `num_left` the last one is the next to go, if it
    was not used again; the first `num_again` were."""

    keys: tuple[int, ...]
    num_left: int
    num_again: int = 0


class PrefixCache:
    """Block ids and checkpoints, least recently used first; ValueError if a limit is out of range.

    Prompts that were stored or touched are kept as they are, and must not change later.

    Args:
        capacity_blocks: Capacity, in blocks of full attention; None for no limit, else at least 1.
        checkpoint_blocks: Size of one checkpoint, in blocks; 0 means that the model has no
            linear state and every leading run is usable.
        on_evict: Called with the key of everything that is evicted: a block's id, or the
            complement of the id after which a checkpoint lay.
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
        self._held: dict[int, _Use] = {}
        """The last use of each key."""
        self._uses: deque[_Use] = deque()
        """Uses of which keys may be held, the oldest first; none without a limit."""
        self._used = self._num_listed = 0
        self._on_evict = on_evict

    @property
    def used_blocks(self) -> int:
        """Blocks in use; never more than the capacity."""
        return self._used

    def leading_run(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that are held. Changes nothing."""
        return _leading_run(self._held, block_ids)

    def usable_hit(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that a prefill can resume after. Changes nothing."""
        run = _leading_run(self._held, block_ids)
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
        if self._checkpoint_blocks and num_used:
            self._renew((~block_ids[num_used - 1],))
        self._renew(block_ids if num_used == len(block_ids) else block_ids[:num_used])

    def demote(self, block_ids: Sequence[int]) -> None:
        """Make blocks the next ones to be evicted, the last one first."""
        self._renew(block_ids)
        self._uses.rotate()

    def clear(self) -> None:
        """Lose everything, as when a host restarts."""
        self._held.clear()
        self._uses.clear()
        self._used = self._num_listed = 0

    def keys(self) -> Iterator[int]:
        """Keys of all blocks and checkpoints."""
        return iter(self._held)

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

    def validate(self) -> None:
        """Check the room of what is held, and the limit; AssertionError if one does not hold."""
        require(self._used == sum(map(self._room, self._held)), "blocks in use")
        require(self._capacity is None or self._used <= self._capacity, "the capacity")

    def _hold(self, keys: Sequence[int], room: int) -> None:
        """Hold each key, the last one as the least recently used."""
        held, before = self._held, len(self._held)
        _hold(held, keys, self._begin_use(keys))
        self._used += room * (len(held) - before)

    def _renew(self, keys: Sequence[int]) -> None:
        """The same with those that are held."""
        _renew(self._held, keys, self._begin_use(keys))

    def _begin_use(self, keys: Sequence[int]) -> _Use:
        use = _Use(tuple(keys), len(keys))
        if self._capacity is not None:
            _use_again(self._held, use.keys)
            if self._num_listed > _LISTED_MAX * len(self._held):
                self._forget_uses()
            self._uses.append(use)
            self._num_listed += use.num_left
        return use

    def _forget_uses(self) -> None:
        """Drop keys from uses that are not their last ones."""
        held, self._num_listed = self._held, 0
        for _ in range(len(self._uses)):
            use = self._uses.popleft()
            use.keys = tuple([key for key in use.keys[: use.num_left] if held.get(key) is use])
            use.num_left, use.num_again = len(use.keys), 0
            if use.num_left:
                self._uses.append(use)
                self._num_listed += use.num_left

    def _evict(self) -> None:
        capacity, on_evict = self._capacity, self._on_evict
        while capacity is not None and self._used > capacity:
            use = self._uses[0]
            before, excess = use.num_left, self._used - capacity
            gone = _take_last(self._held, use.keys, use, 1 if self._checkpoint_blocks else excess)
            self._num_listed -= before - use.num_left
            self._used -= len(gone)
            for key in gone if self._checkpoint_blocks or on_evict is not None else ():
                self._used -= self._room(key) - 1
                if on_evict is not None:
                    on_evict(key)
            if use.num_left <= use.num_again:
                self._num_listed -= use.num_left
                self._uses.popleft()

    def _room(self, key: int) -> int:
        return 1 if key >= 0 else self._checkpoint_blocks


_NO_USE = _Use((), 0)


def _leading_run(held: dict[K, _Use], keys: Sequence[K]) -> int:
    """Number of leading keys that are held. Of any type: compiled, whole numbers that are read as
    such would be made anew for each look-up; and a tuple is walked through without an iterator."""
    for count, key in enumerate(tuple(keys)):
        if key not in held:
            return count
    return len(keys)


def _use_again(held: dict[K, _Use], keys: tuple[K, ...]) -> None:
    """Note in the last use of a prompt how much of it is used again: that need not be gone through
    when it is the oldest."""
    if keys and (before := held.get(keys[0])) is not None:
        num = min(len(keys), len(before.keys))
        if num > before.num_again and before.keys[:num] == keys[:num]:
            before.num_again = num


def _take_last(held: dict[K, _Use], keys: tuple[K, ...], use: _Use, num_max: int) -> list[K]:
    """Drop up to so many keys, of those of a use that were not used again: the last ones."""
    gone: list[K] = []
    left = use.num_left
    while left > use.num_again and len(gone) < num_max:
        left -= 1
        key = keys[left]
        if held.get(key) is use:
            del held[key]
            gone.append(key)
    use.num_left = left
    return gone


def _hold(held: dict[K, _Use], keys: Sequence[K], use: _Use) -> None:
    for key in tuple(keys):
        held[key] = use


def _renew(held: dict[K, _Use], keys: Sequence[K], use: _Use) -> None:
    for key in tuple(keys):
        if key in held:
            held[key] = use


class SharedPrefixCache(PrefixCache):
    """A prefix cache that evicts like the pool nodes of tenants with shares.

    A block is of the tenant that `tenant` named when it was stored.

    Args:
        checkpoint_blocks: Size of one checkpoint, blocks; 0 for a model without linear state.
        on_evict: Called with the key and the tenant of everything that is evicted.
    """

    def __init__(
        self,
        capacity_blocks: int,
        checkpoint_blocks: int,
        shares: Mapping[str, Share],
        on_evict: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        super().__init__(capacity_blocks, checkpoint_blocks)
        self._capacity_blocks = capacity_blocks
        self._shares = shares
        self._on_eviction = on_evict
        self._owners: dict[int, str] = {}
        self.clear()
        self.tenant = ""
        """Tenant of the blocks that are stored from now on."""

    def touch(self, block_ids: Sequence[int], num_used: int) -> None:
        """Note that the first `num_used` blocks served a hit."""
        used = [*reversed(block_ids[:num_used])]
        if num_used:
            used.insert(0, ~block_ids[num_used - 1])
        for key in used:
            if key in self._owners:
                self._policy.used(key, self._owners[key], self._room(key))

    def clear(self) -> None:
        """Lose everything, as when a host restarts."""
        super().clear()
        self._owners.clear()
        self._policy: TenantShares[int] = TenantShares(LeastRecentlyUsed(), self._capacity_blocks)
        self._policy.assign(self._shares, ())

    def discard(self, key: int) -> None:
        """Drop one block or checkpoint without a call of `on_evict`."""
        if key in self._held:
            self._policy.removed(key, self._owners.pop(key), self._room(key))
        super().discard(key)

    def validate(self) -> None:
        """Check that the order of eviction has what is held, of its tenants."""
        super().validate()
        require(self._owners.keys() == self._held.keys(), "owners")
        self._policy.validate(Held(k, tag, self._room(k)) for k, tag in self._owners.items())

    def _hold(self, keys: Sequence[int], room: int) -> None:
        for key in reversed(keys):
            if key in self._owners:
                self._policy.used(key, self._owners[key], room)
                continue
            self._held[key] = _NO_USE
            self._owners[key] = self.tenant
            self._used += room
            self._policy.added(key, self.tenant, room)

    def _evict(self) -> None:
        while self._policy.excess_bytes(self.tenant):
            self._drop(next(self._policy.own(self.tenant)))
        while self._used > self._capacity_blocks:
            self._drop(next(self._policy.order(self.tenant)))

    def _drop(self, key: int) -> None:
        tenant = self._owners[key]
        self.discard(key)
        self._on_eviction(key, tenant)


class TieredHit(NamedTuple):
    """Hit of a prompt in a cache, in leading blocks."""

    num_blocks: int
    """Usable from both tiers."""
    num_host_blocks: int
    """Usable from host memory alone; at most `num_blocks`."""
    num_disk_blocks: int = 0
    """Blocks to read from disk for `num_blocks`."""
    reads_checkpoint: bool = False
    """True if the checkpoint has to be read as well."""


class TieredCache:
    """Host memory above disk; both least recently used first; ValueError if a limit is out of
    range.

    Args:
        host_blocks: Capacity in host memory, blocks; None for no limit, 0 for none.
        disk_blocks: Capacity on disk, blocks; None for no limit, 0 for no disk.
        checkpoint_blocks: Size of a checkpoint of linear state, blocks; 0 for a model without.
        shares: Of tenants in both tiers; a tier without limit has none.
    """

    def __init__(
        self,
        host_blocks: int | None,
        disk_blocks: int | None = 0,
        checkpoint_blocks: int = 0,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        self._disk = self._host = None
        if disk_blocks != 0:
            self._disk = _cache(disk_blocks, checkpoint_blocks, shares, None)
        if host_blocks != 0:
            self._host = _cache(host_blocks, checkpoint_blocks, shares, self._disk)
        self._shared = [t for t in (self._host, self._disk) if isinstance(t, SharedPrefixCache)]
        self._has_checkpoints = checkpoint_blocks > 0
        self.host_hit = _no_hit if self._host is None else self._host.usable_hit
        """Leading blocks that host memory alone can serve. Changes nothing."""

    @property
    def used_blocks(self) -> tuple[int, int]:
        """Blocks in host memory and on disk; never more than their limits."""
        host = 0 if self._host is None else self._host.used_blocks
        return host, 0 if self._disk is None else self._disk.used_blocks

    @property
    def has_disk(self) -> bool:
        """Return True if there is a second tier."""
        return self._disk is not None

    def hit(self, block_ids: Sequence[int]) -> TieredHit:
        """Return the hit without side effects."""
        disk = self._disk
        in_host = self.host_hit(block_ids)
        if disk is None or not disk.used_blocks:
            return TieredHit(in_host, in_host)
        run = self.leading_run(block_ids)
        while run and self._has_checkpoints and not self._holds(~block_ids[run - 1]):
            run -= 1
        if run <= in_host:
            return TieredHit(in_host, in_host)
        num_disk = sum(map(disk.holds, block_ids[:run]))
        return TieredHit(run, in_host, num_disk, disk.holds(~block_ids[run - 1]))

    def leading_run(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that are held, in either tier. Changes nothing."""
        for count, block in enumerate(block_ids):
            if not self._holds(block):
                return count
        return len(block_ids)

    def store(self, block_ids: Sequence[int], *, checkpoint: bool = True, tenant: str = "") -> None:
        """Hold the blocks of a prompt in host memory, now the most recently used.

        Args:
            block_ids: Ids from the start of the prompt, each at least 0.
            checkpoint: True if the linear state at their end is there too.
            tenant: Whose they are; empty if unknown.
        """
        if self._host is None:
            return
        for tier in self._shared:
            tier.tenant = tenant
        if self._disk is not None:
            _lift(self._disk, block_ids)
        self._host.store(block_ids, None if checkpoint else 0)

    def touch(self, block_ids: Sequence[int], num_used: int, tenant: str = "") -> None:
        """The first `num_used` blocks served a hit of a tenant: those on disk are promoted."""
        if self._host is None or not num_used:
            return
        for tier in self._shared:
            tier.tenant = tenant
        if self._disk is None:
            self._host.touch(block_ids, num_used)
            return
        used = block_ids[:num_used]
        found = [block for block in used if self._holds(block)]
        state = self._has_checkpoints and self._holds(~used[-1]) and len(found) == len(used)
        _lift(self._disk, found)
        self._host.store(found, None if state else 0)

    def demote(self, block_ids: Sequence[int]) -> None:
        """Make blocks in host memory the next ones to be evicted from it, the last one first."""
        if self._host is not None:
            self._host.demote(block_ids)

    def clear(self, *, keep_disk: bool) -> None:
        """Lose host memory, and the disk too unless it is kept."""
        if self._host is not None:
            self._host.clear()
        if self._disk is not None and not keep_disk:
            self._disk.clear()

    def validate(self) -> None:
        """Check both tiers, and that what one holds is not in the other."""
        tiers = [tier for tier in (self._host, self._disk) if tier is not None]
        for tier in tiers:
            tier.validate()
        if len(tiers) > 1:
            require(not any(map(tiers[0].holds, tiers[1].keys())), "a block in two tiers")

    def _holds(self, key: int) -> bool:
        return any(tier is not None and tier.holds(key) for tier in (self._host, self._disk))


def _no_hit(_block_ids: Sequence[int]) -> int:
    return 0


def _cache(
    num_blocks: int | None,
    checkpoint_blocks: int,
    shares: Mapping[str, Share] | None,
    below: PrefixCache | None,
) -> PrefixCache:
    """A tier, with shares if it has a limit and any tenant has a share."""
    if not shares or num_blocks is None:
        return PrefixCache(num_blocks, checkpoint_blocks, below.accept if below else None)

    def spill(key: int, tenant: str) -> None:
        if isinstance(below, SharedPrefixCache):
            below.tenant = tenant
        if below is not None:
            below.accept(key)

    return SharedPrefixCache(num_blocks, checkpoint_blocks, shares, spill)


def _lift(disk: PrefixCache, block_ids: Sequence[int]) -> None:
    """Take blocks, and the checkpoint at their end, off the disk."""
    if block_ids:
        for block in block_ids:
            disk.discard(block)
        disk.discard(~block_ids[-1])
