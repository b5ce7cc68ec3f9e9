"""Links between the pools of engines that come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import permutations, product

LinkEnds = tuple[str, str]
"""Source and destination pool of a link."""


class PoolLinks:
    """Links from each PrfaaS pool to each PD pool, and between the pools of a cluster.

    A pool without engines has no links. An event costs work for its own pool only.

    Args:
        engines: Name, pool and cluster of each engine.
        local: Names of the PD clusters.
    """

    def __init__(self, engines: Iterable[tuple[str, str, str]], local: Collection[str]) -> None:
        self._local_names = local
        self._engines: dict[str, dict[str, None]] = {}
        self._cluster: dict[str, str] = {}
        """Cluster of each pool with engines."""
        self._pools: dict[str, dict[str, None]] = {}
        """Pools of each cluster; none is empty."""
        for name, pool, cluster in engines:
            self.add(name, pool, cluster)

    def add(self, name: str, pool: str, cluster: str) -> list[LinkEnds]:
        """An engine joins; return the links that this makes."""
        is_new = pool not in self._engines
        self._engines.setdefault(pool, {})[name] = None
        if not is_new:
            return []
        self._cluster[pool] = cluster
        self._pools.setdefault(cluster, {})[pool] = None
        return self.of(pool)

    def remove(self, name: str, pool: str) -> None:
        """An engine has left."""
        del self._engines[pool][name]
        if self._engines[pool]:
            return
        del self._engines[pool]
        cluster = self._cluster.pop(pool)
        del self._pools[cluster][pool]
        if not self._pools[cluster]:
            del self._pools[cluster]

    def engines_of(self, pool: str) -> Collection[str]:
        """Engines of a pool."""
        return self._engines.get(pool, ())

    def cluster_of(self, pool: str) -> str:
        """Cluster of a pool with engines."""
        return self._cluster[pool]

    def all(self) -> list[LinkEnds]:
        """All links; as many as pools squared."""
        within = [ends for pools in self._pools.values() for ends in permutations(pools, 2)]
        return [*product(self._side(local=False), self._side(local=True)), *within]

    def of(self, pool: str) -> list[LinkEnds]:
        """Links of a pool."""
        if (cluster := self._cluster.get(pool)) is None:
            return []
        is_local = cluster in self._local_names
        across = self._side(local=not is_local)
        hosts = [other for other in self._pools[cluster] if other != pool]
        return [
            *((other, pool) if is_local else (pool, other) for other in across),
            *((pool, other) for other in hosts),
            *((other, pool) for other in hosts),
        ]

    def _side(self, *, local: bool) -> list[str]:
        """Pools of the PD clusters, or of the PrfaaS clusters."""
        found = self._pools.items()
        return [pool for name, its in found if (name in self._local_names) is local for pool in its]
