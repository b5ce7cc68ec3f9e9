"""Device memory of instances: a prefix cache each, like that of an engine with KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.sim.resources.prefill_instance import PrefillJob
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import BlockSetup, CacheSetup


class Devices:
    """The memories of all instances that prefill, least recently used first.

    Args:
        clusters: Instances of each cluster by name, and its limits.
        blocks: What they count in.
    """

    def __init__(
        self, clusters: Iterable[tuple[Sequence[str], CacheSetup]], blocks: BlockSetup
    ) -> None:
        self._span = blocks.tokens
        self._caches = {
            name: PrefixCache(setup.device_blocks, blocks.checkpoint_blocks)
            for names, setup in clusters
            if setup.device_blocks != 0
            for name in names
        }

    @property
    def num_instances(self) -> int:
        """Instances whose memory is simulated."""
        return len(self._caches)

    def hits(self, request: Request) -> dict[str, int]:
        """Prefix that prefill could resume after, tokens, by instance; who has none is left out."""
        limit, found = request.num_prompt_tokens - 1, {}
        for name, cache in self._caches.items():
            if length := cache.usable_hit(request.block_ids):
                found[name] = min(length * self._span, limit)
        return found

    def resume(self, name: str, request: Request) -> int:
        """Prefix that an instance's prefill resumes after, tokens; it counts as used."""
        cache = self._caches.get(name)
        length = 0 if cache is None else cache.usable_hit(request.block_ids)
        if cache is None or not length:
            return 0
        cache.touch(request.block_ids, length)
        return min(length * self._span, request.num_prompt_tokens - 1)

    def store(self, name: str, block_ids: Sequence[int]) -> None:
        """An instance computed a prompt."""
        if block_ids:
            self._caches[name].store(block_ids)

    def keeping(
        self, name: str, then: Callable[[PrefillJob], None]
    ) -> Callable[[PrefillJob], None]:
        """Callback for the end of an instance's jobs: cache the computed blocks, and continue.

        Args:
            then: What comes after; all there is to do where its memory is not simulated.
        """
        if name not in self._caches:
            return then

        def done(job: PrefillJob) -> None:
            self.store(name, job.request.block_ids)
            then(job)

        return done

    def clear(self, name: str) -> None:
        """An instance failed: it comes back with an empty memory."""
        if name in self._caches:
            self._caches[name].clear()
