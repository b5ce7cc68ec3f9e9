"""The prefix caches of a simulated run, one for each pool."""

from __future__ import annotations

from prfaas.core.prefix_cache import PrefixCache
from prfaas.sim.request import Request
from prfaas.sim.setup import CacheSetup

PD_POOL, PRFAAS_POOL = "pd", "prfaas"


class Caches:
    """What each pool holds, as the gateway's index would say.

    Args:
        setup: Limits.
    """

    def __init__(self, setup: CacheSetup) -> None:
        self._block_tokens = setup.block_tokens
        limits = {PD_POOL: setup.pd_blocks, PRFAAS_POOL: setup.prfaas_blocks}
        self._by_pool = {
            pool: PrefixCache(blocks, setup.checkpoint_blocks)
            for pool, blocks in limits.items()
            if blocks != 0
        }

    def hits(self, request: Request) -> dict[str, int]:
        """Usable cached prefix by pool, tokens."""
        if not request.block_ids:
            return {}
        limit = request.num_prompt_tokens - 1
        return {
            pool: min(cache.usable_hit(request.block_ids) * self._block_tokens, limit)
            for pool, cache in self._by_pool.items()
        }

    def use(self, pool: str, request: Request, hit_tokens: int) -> None:
        """A prefill resumed after `hit_tokens` that the pool held."""
        cache = self._by_pool.get(pool)
        if cache is not None and hit_tokens:
            cache.touch(request.block_ids, -(-hit_tokens // self._block_tokens))

    def store(self, pool: str, request: Request) -> None:
        """All blocks of a prompt are in the pool."""
        cache = self._by_pool.get(pool)
        if cache is not None and request.block_ids:
            cache.store(request.block_ids)
