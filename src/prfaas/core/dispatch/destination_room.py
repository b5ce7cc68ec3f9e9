"""Free memory in destination pools for blocks in transit."""

from __future__ import annotations

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import shipped_bytes

USABLE_RATIO = 0.8
"""Share of a pool's memory that blocks in transit may take together. A pool keeps up to an eighth
free for blocks that it receives, and rounds each block up."""


class DestinationMemory:
    """Bytes that open requests will need in each pool, against the memory that it has.

    Blocks count from the decision until decode has loaded them. Others are evicted for them.
    """

    def __init__(self) -> None:
        self._capacity: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._by_request: dict[int, tuple[str, int]] = {}

    def set_capacity(self, pool: str, num_bytes: int) -> None:
        """A pool has so much memory; 0 is not known."""
        self._capacity[pool] = num_bytes

    def forget(self, pool: str) -> None:
        """Forget a pool to which no blocks are in transit."""
        self._capacity.pop(pool, None)
        self._taken.pop(pool, None)

    def fits(self, pool: str, layout: Layout | None, have_tokens: int, final_tokens: int) -> bool:
        """Return True if the pool has free memory for the blocks between two lengths of a prompt.

        Args:
            layout: Of the blocks; None is not known, and then they fit.
            have_tokens: Usable prefix that the pool holds.
            final_tokens: Length at which decode resumes.
        """
        capacity = self._capacity.get(pool, 0)
        if layout is None or not capacity:
            return True
        wanted = shipped_bytes(layout, have_tokens=have_tokens, final_tokens=final_tokens)
        return self._taken.get(pool, 0) + wanted <= capacity * USABLE_RATIO

    def take(
        self, request_id: int, pool: str, layout: Layout | None, have_tokens: int, final_tokens: int
    ) -> None:
        """The blocks of a request will come to a pool."""
        self.give_back(request_id)
        if layout is not None:
            wanted = shipped_bytes(layout, have_tokens=have_tokens, final_tokens=final_tokens)
            self._by_request[request_id] = pool, wanted
            self._taken[pool] = self._taken.get(pool, 0) + wanted

    def give_back(self, request_id: int) -> None:
        """The blocks of a request were loaded, or none waits for them; no effect if not taken."""
        pool, num_bytes = self._by_request.pop(request_id, ("", 0))
        if num_bytes:
            self._taken[pool] -= num_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes in transit to all pools; 0 when nothing is."""
        return sum(self._taken.values())
