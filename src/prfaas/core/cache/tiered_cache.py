"""A prefix cache of two tiers: what host memory evicts spills to disk, what is used is promoted.

A block lies in one tier. Of a hit the part on disk has to be read before prefill can resume, which
takes time; the caller decides whether that is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.core.cache.shared_prefix_cache import SharedPrefixCache
from prfaas.core.cache.tenant_shares import Share


class TieredHit(NamedTuple):
    """Hit of a prompt in a cache, in leading blocks.

    Attributes:
        num_blocks: Usable from both tiers.
        num_host_blocks: Usable from host memory alone; at most `num_blocks`.
        num_disk_blocks: Blocks to read from disk for `num_blocks`.
        reads_checkpoint: True if the checkpoint has to be read as well.
    """

    num_blocks: int
    num_host_blocks: int
    num_disk_blocks: int = 0
    reads_checkpoint: bool = False


class TieredCache:
    """Host memory above disk; both least recently used first.

    Args:
        host_blocks: Capacity in host memory, blocks; None for no limit, 0 for none.
        disk_blocks: Capacity on disk, blocks; None for no limit, 0 for no disk.
        checkpoint_blocks: Size of a checkpoint of linear state, blocks; 0 for a model without.
        shares: Of tenants in both tiers; a tier without limit has none.

    Raises:
        ValueError: A limit is out of range.
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
