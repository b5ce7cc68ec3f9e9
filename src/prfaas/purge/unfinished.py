"""Parts of purges that are not done, and what a repeat asks for their sake."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from prfaas.purge.targets import Target


class Unfinished:
    """Pool nodes and engines at which a purge failed, since the process started."""

    def __init__(self) -> None:
        self._left: dict[Target, frozenset[str]] = {}

    def note(self, target: Target, asked: Collection[str] | None, failed: Iterable[str]) -> bool:
        """Record an attempt; return True if nothing is left to do.

        Args:
            asked: Names of the parts that were asked; None if all were.
            failed: Those that are not done, and may be later.
        """
        earlier = frozenset[str]() if asked is None else self._left.get(target, frozenset())
        left = (earlier - frozenset(asked or ())) | frozenset(failed)
        self._left[target] = left
        if not left:
            del self._left[target]
        return not left

    def due(
        self,
        target: Target,
        reachable: Collection[str],
        pools: Collection[str],
        clusters: Iterable[tuple[Collection[str], Collection[str]]],
    ) -> frozenset[str]:
        """Names of the parts to be asked now; empty if a repeat would change nothing.

        After a failure at a pool node, engines of its cluster may have loaded blocks from it again;
        after one at an engine, it may have stored blocks in pools of its cluster. Before the first
        attempt of this process all parts are due, once all pools are connected.

        Args:
            reachable: Parts that can be asked.
            clusters: Pool nodes and engines of each cluster.
        """
        left = self._left.get(target)
        if left is None:
            is_up = all(name in reachable for name in pools)
            return frozenset(pools).union(*(each for _, each in clusters)) if is_up else frozenset()
        found = roots = left.intersection(reachable)
        for nodes, engines in clusters:
            if not roots.isdisjoint(nodes):
                found = found.union(engines)
            if not roots.isdisjoint(engines):
                found = found.union(nodes)
        return found
