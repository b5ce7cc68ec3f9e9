"""Prefix caches of hosts and of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prfaas.core.cache.prefix_cache import PrefixCache, TieredCache, TieredHit
from prfaas.core.routing.predictions import Costs
from prfaas.records import Record
from prfaas.sim.resources.prefill_instance import PrefillJob
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import BlockSetup, CacheSetup, ClusterSetup, Setup
from prfaas.units import BITS_PER_BYTE, NS_PER_S


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


class Hit(Record, frozen=True):
    """Hit of a prompt in a pool or in an instance's memory."""

    num_tokens: int
    """Prefix that prefill resumes after."""
    read_ns: int = 0
    """Time to read what of it lies on disk."""


_NO_HIT = Hit(0)


class Pool:
    """One cache.

    Args:
        blocks: What they count in.
        costs: Of the cluster's prefill, to decide if reading from disk pays.
        remote: True if the cluster is a PrfaaS cluster.
        num_hosts: Of the cluster; each pool gets an equal part of the limits.
    """

    def __init__(
        self, setup: CacheSetup, blocks: BlockSetup, costs: Costs, *, remote: bool, num_hosts: int
    ) -> None:
        self._span, self._costs = blocks.tokens, costs
        self._prefill_ns = costs.remote_prefill_ns if remote else costs.local_prefill_ns
        host, disk = (n and n // num_hosts for n in (setup.host_blocks, setup.disk_blocks))
        self._cache = TieredCache(host, disk, blocks.checkpoint_blocks, setup.shares)
        self._has_disk = self._cache.has_disk
        self._ns_per_byte = BITS_PER_BYTE * NS_PER_S / setup.disk_bits_per_s
        self.is_up = self.is_known = True

    def hit(self, request: Request) -> Hit:
        """Hit in the gateway's index: 0 while the contents of the pool are unknown."""
        if not self.is_known:
            return _NO_HIT
        limit, span = request.num_prompt_tokens - 1, self._span
        if not self._has_disk:
            held = self._cache.host_hit(request.block_ids) * span
            return Hit(held if held < limit else limit)
        found = self._cache.hit(request.block_ids)
        host = Hit(min(found.num_host_blocks * span, limit))
        if found.num_blocks == found.num_host_blocks:
            return host
        both = Hit(min(found.num_blocks * span, limit), self._read_ns(found))
        prompt = request.num_prompt_tokens
        in_host, in_both = host.num_tokens, both.num_tokens
        recomputed_ns = self._prefill_ns(prompt - in_host, in_host)
        read_ns = both.read_ns + self._prefill_ns(prompt - in_both, in_both)
        return both if read_ns < recomputed_ns else host

    def use(self, request: Request, hit_tokens: int) -> None:
        """A prefill resumed after `hit_tokens` that the pool held."""
        if self.is_up and hit_tokens:
            blocks = -(-hit_tokens // self._span)
            self._cache.touch(
                request.block_ids, min(blocks, len(request.block_ids)), request.tenant
            )

    def store(self, block_ids: Sequence[int], tenant: str = "", *, checkpoint: bool = True) -> None:
        """Blocks from the start of a prompt are there."""
        if self.is_up and block_ids:
            self._cache.store(block_ids, checkpoint=checkpoint, tenant=tenant)

    def demote(self, block_ids: Sequence[int]) -> None:
        """Evict these blocks first: another host has them too."""
        self._cache.demote(block_ids)

    def num_held(self, block_ids: Sequence[int]) -> int:
        """Leading blocks that are there."""
        return self._cache.leading_run(block_ids)

    def fail(self, *, keeps_disk: bool) -> None:
        """Drop the blocks in memory, and those on disk unless they are kept."""
        self.is_up = self.is_known = False
        self._cache.clear(keep_disk=keeps_disk)

    def _read_ns(self, found: TieredHit) -> int:
        costs, tokens = self._costs, found.num_disk_blocks * self._span
        size = costs.kv_bytes(tokens) - costs.state_bytes if tokens else 0
        state = costs.state_bytes if found.reads_checkpoint else 0
        return round((size + state) * self._ns_per_byte)


class Caches:
    """All pools by name, and what instances hold themselves.

    Args:
        instances: Names of the instances that prefill, by cluster.
    """

    def __init__(self, setup: Setup, instances: Mapping[str, Sequence[str]]) -> None:
        self.block_tokens = setup.blocks.tokens
        self.pools = {name: _pool(setup, setup.blocks, remote=False) for name in setup.pools}
        for cluster in setup.prfaas:
            for name in cluster.pools:
                self.pools[name] = _pool(cluster, setup.blocks, remote=True)
        limits = {setup.name: setup.cache, **{c.name: c.cache for c in setup.prfaas}}
        self.devices = Devices([(instances[n], limits[n]) for n in limits], setup.blocks)
        self._have_own = self.devices.num_instances > 0
        self.any_room = any(
            room != 0
            for limit in limits.values()
            for room in (limit.host_blocks, limit.disk_blocks, limit.device_blocks)
        )
        """True if there is any cache at all."""

    def hits(self, request: Request) -> dict[str, int]:
        """Hits in each pool, and in each instance with its own memory, tokens.

        Blocks that a pool kept for the request itself count too.
        """
        found = {}
        if request.block_ids:
            found = {name: pool.hit(request).num_tokens for name, pool in self.pools.items()}
            if self._have_own:
                found.update(self.devices.hits(request))
        if request.kept_tokens:
            kept = min(request.kept_tokens, request.num_prompt_tokens - 1)
            found[request.kept_in] = max(found.get(request.kept_in, 0), kept)
        return found

    def resume(self, request: Request, pool: str, instance: str) -> Hit:
        """Look a prompt up once more as its prefill starts, and use what is there.

        A prompt may have waited long: others computed its prefix meanwhile, or it was evicted.
        Nothing is read from disk where the instance holds as much as its pool.

        Args:
            request: The request that starts its prefill.
            pool: Pool of the instance that prefills.

        Returns:
            The prefix that prefill resumes after, and the time to read what of it lies on disk.
        """
        hit = _NO_HIT
        if request.block_ids:
            hit = self.pools[pool].hit(request)
            self.pools[pool].use(request, hit.num_tokens)
            if self._have_own:
                own = self.devices.resume(instance, request)
                hit = Hit(own) if own >= hit.num_tokens else hit
        if request.kept_tokens and pool == request.kept_in:
            kept = min(request.kept_tokens, request.num_prompt_tokens - 1)
            return Hit(kept) if kept > hit.num_tokens else hit
        return hit

    def keep(self, request: Request, pool: str, num_tokens: int) -> None:
        """Add the first tokens of a prompt from a cut transfer to a pool."""
        if not self.pools[pool].is_up:
            return
        whole = num_tokens // self.block_tokens
        before = request.kept_tokens if request.kept_in == pool else 0
        request.kept_tokens, request.kept_in = max(before, whole * self.block_tokens), pool
        blocks = request.block_ids[:whole]
        # What arrived of a model with linear state ends at a checkpoint.
        at_end = whole * self.block_tokens == num_tokens
        self.pools[pool].store(blocks, request.tenant, checkpoint=at_end)


def _pool(cluster: Setup | ClusterSetup, blocks: BlockSetup, *, remote: bool) -> Pool:
    hosts = cluster.num_hosts
    return Pool(cluster.cache, blocks, cluster.costs, remote=remote, num_hosts=hosts)
