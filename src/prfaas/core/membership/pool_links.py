"""Links between the pools of engines that come and go."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import permutations, product

LinkEnds = tuple[str, str]
"""Source and destination pool of a link."""


class PoolLinks:
    """Links from each PrfaaS pool to each PD pool, and between the PD pools of a cluster.

    A pool without engines has no links. An event costs work for its own pool only.

    Args:
        engines: Name, pool and cluster of each engine.
        home: Names of the PD clusters.
    """

    def __init__(self, engines: Iterable[tuple[str, str, str]], home: Collection[str]) -> None:
        self._home_names = home
        self._engines: dict[str, dict[str, None]] = {}
        self._home: dict[str, str] = {}
        """Clusters of PD pools; of others below."""
        self._away: dict[str, str] = {}
        for name, pool, cluster in engines:
            self.add(name, pool, cluster)

    def add(self, name: str, pool: str, cluster: str) -> list[LinkEnds]:
        """An engine joins; return the links that this makes."""
        is_new = pool not in self._engines
        self._engines.setdefault(pool, {})[name] = None
        if not is_new:
            return []
        (self._home if cluster in self._home_names else self._away)[pool] = cluster
        return self.of(pool)

    def remove(self, name: str, pool: str) -> None:
        """An engine has left."""
        del self._engines[pool][name]
        if not self._engines[pool]:
            for pools in (self._engines, self._home, self._away):
                pools.pop(pool, None)

    def engines_of(self, pool: str) -> Collection[str]:
        """Engines of a pool."""
        return self._engines.get(pool, ())

    def cluster_of(self, pool: str) -> str:
        """Cluster of a pool with engines."""
        return self._home.get(pool) or self._away[pool]

    def all(self) -> list[LinkEnds]:
        """All links; as many as pools squared."""
        home = self._home
        within = permutations(home, 2)
        between = [ends for ends in within if home[ends[0]] == home[ends[1]]]
        return [*product(self._away, home), *between]

    def of(self, pool: str) -> list[LinkEnds]:
        """Links of a pool."""
        if pool in self._away:
            return [(pool, other) for other in self._home]
        if pool not in self._home:
            return []
        cluster = self._home[pool]
        others = [other for other, its in self._home.items() if its == cluster and other != pool]
        return [
            *((other, pool) for other in self._away),
            *((pool, other) for other in others),
            *((other, pool) for other in others),
        ]
