"""The prefill instances of one cluster, and the selection of one for a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice, zip_longest

from prfaas.core.dispatch.hosts import FetchTo
from prfaas.core.dispatch.instance_load import LoadBook
from prfaas.core.dispatch.scoring import (
    LOOKS_MAX,
    OPEN_MAX,
    PREFILL_WEIGHTS,
    Best,
    Bound,
    Candidate,
    Fetched,
    Pick,
    Weights,
    any_of,
    is_ideal,
    pick,
)
from prfaas.core.dispatch.types import Arrival, Member
from prfaas.core.kv.source_sets import Sources, longest_first


@dataclass(slots=True)
class Instance:
    """State of an instance without its load.

    Attributes:
        name: Unique.
        pool: Where its blocks are kept.
        num_tokens_max: Longest prompt it takes, tokens.
        layout_id: Layout of its blocks; None while unknown.
        within: As of `Member`.
    """

    name: str
    pool: str
    num_tokens_max: int = 2**31
    layout_id: bytes | None = b""
    within: frozenset[str] = frozenset()


SCANNED_MAX = 32
"""Up to so many instances, a look at each is faster than a search."""
HOLDERS_MAX = 4
"""Pools and instances with the longest prefixes that a search begins with."""
BY_POOL = (1, 2)
"""Obstacles, as of `stopped_at`, that all instances of a pool with the same layout have."""
_Kind = tuple[str, bytes | None, int, int, frozenset[str]]

Reach = Callable[[Instance], tuple[bool, bool, bool]]
"""Function of an instance: do the layouts agree, does a link connect the pools, and does it have
cores that the local instance lacks?"""


def _first(fetches: dict[str, Fetched], rated: Callable[[Fetched], float]) -> list[str]:
    """Up to `HOLDERS_MAX` pools, the best first, of which each is better than the next one."""
    scores, found = {each: rated(each) for each in set(fetches.values())}, list[str]()
    best = nlargest(HOLDERS_MAX + 1, fetches, key=lambda pool: scores[fetches[pool]])
    for pool, following in zip_longest(best[:HOLDERS_MAX], best[1:]):
        if following is not None and scores[fetches[pool]] == scores[fetches[following]]:
            break
        found.append(pool)
    return found


class PrefillInstances:
    """The prefill instances of one cluster, in the order of their load.

    Args:
        members: The instances.
        stale_after_ns: Age beyond which a report counts as unknown.
        weights: Of the scores of its instances.
        scanned_max: Up to so many instances, `pick` looks at each; beyond, it searches.
    """

    def __init__(
        self,
        members: Sequence[Member],
        stale_after_ns: int,
        weights: Weights = PREFILL_WEIGHTS,
        scanned_max: int = SCANNED_MAX,
    ) -> None:
        self.book = LoadBook([member.name for member in members], stale_after_ns)
        self.instances = {m.name: Instance(m.name, m.pool, within=m.within) for m in members}
        self.by_pool: dict[str, list[str]] = {}
        """Names of the instances of each pool."""
        for member in members:
            self.by_pool.setdefault(member.pool, []).append(member.name)
        self.sources = Sources([*self.by_pool, *self.instances])
        """Its pools and instances, as holders of prefixes."""
        self.weights, self._scanned_max = weights, scanned_max
        self._num_open = dict.fromkeys(self.instances, 0)

    def add(self, member: Member) -> None:
        """Add an instance, which is not ready and has no known layout."""
        self.book.add(member.name)
        self.instances[member.name] = Instance(member.name, member.pool, 0, None, member.within)
        self._num_open[member.name] = 0
        self.by_pool.setdefault(member.pool, []).append(member.name)
        self.sources.add(member.name)
        self.sources.add(member.pool)

    def remove(self, name: str, now_ns: int) -> None:
        """Forget an instance that has no requests."""
        self.book.remove(name, now_ns)
        pool = self.instances.pop(name).pool
        del self._num_open[name]
        self.by_pool[pool].remove(name)
        self.sources.discard(name)
        if not self.by_pool[pool]:
            del self.by_pool[pool]
            self.sources.discard(pool)

    @property
    def pools(self) -> Collection[str]:
        """Pools of its instances."""
        return self.by_pool.keys()

    @property
    def first_pool(self) -> str:
        """The pool that has been there longest; "" without any."""
        return next(iter(self.by_pool), "")

    def least_wait_ns(self, now_ns: int) -> int | None:
        """Predicted wait for the instance that is free first; None when unknown."""
        name = self.book.least()
        return None if name is None else self.book.wait_ns(name, now_ns)

    def enter(self, name: str) -> None:
        """An instance has one more request to decode."""
        self._num_open[name] += 1

    def leave(self, name: str) -> None:
        """An instance has one request less to decode."""
        self._num_open[name] -= 1

    def pick(
        self,
        arrival: Arrival,
        now_ns: int,
        reach: Reach | None = None,
        fetch: FetchTo | None = None,
    ) -> Pick:
        """Candidates for a prompt.

        Args:
            arrival: The request.
            now_ns: Time.
            reach: From an instance to where its blocks are wanted; None when they stay.
            fetch: What an instance's host can fetch from another one; None if nothing.
        """
        if len(self.book.order) > self._scanned_max:
            return self.search(arrival, now_ns, reach, fetch)
        hits, hints, most, most_device = arrival.hits, arrival.hints, 0, 0
        for source in hits:
            if source in self.instances and hits[source] > most_device:
                most_device = hits[source]
        for pool in self.by_pool if hits or hints else ():
            hit = hits.get(pool, 0)
            if hints:
                hit = max(hit, hints.get(pool, 0))
            most = max(most, hit)
        most, num_tokens = max(most, most_device), arrival.num_tokens_to_fit
        first = self.book.first(now_ns)
        if first is not None:
            candidate = self._candidate(arrival, *first, reach, fetch)
            if is_ideal(candidate, num_tokens, most, most_device):
                return Pick(candidate, None, (candidate,))
        return pick(
            self._candidates(arrival, now_ns, reach, fetch),
            num_tokens,
            hit_tokens_max=most,
            weights=self.weights,
            device_tokens_max=most_device,
        )

    def search(
        self,
        arrival: Arrival,
        now_ns: int,
        reach: Reach | None = None,
        fetch: FetchTo | None = None,
    ) -> Pick:
        """The choice of a scan, where most instances are never looked at.

        Those with the longest prefixes come first. How good another one could be follows from its
        wait and its open requests.
        """
        num_tokens, weights, num_open = arrival.num_tokens_to_fit, self.weights, self._num_open
        best, least_open = Best(num_tokens, weights), dict[_Kind, int]()
        closed = set[tuple[str, bytes | None]]()

        def look(place: tuple[int, str], wait_ns: int | None) -> None:
            name, decodes = place[1], num_open[place[1]]
            kind = self._kind(name, arrival)
            if decodes < least_open.get(kind, OPEN_MAX):
                stopped = best.look(self._candidate(arrival, name, wait_ns, reach, fetch), place)
                if stopped in BY_POOL:
                    closed.add(kind[:2])
                if name != arrival.avoid and wait_ns is not None:
                    least_open[kind] = decodes

        pools, rest = self._holders(arrival)
        for place in self.book.places(name for pool in pools for name in self.by_pool[pool]):
            look(place, self.book.wait_ns(place[1], now_ns))
        bound, fetches = Bound(num_tokens, weights, rest), dict[str, Fetched]()
        fewest = min(num_open.values()) if weights.few_open else 0
        most = None if fetch is None else fetch.beyond(rest)
        if fetch and most and self.book.order and best.score <= bound(0, fewest, most):
            # Pools with the best links come first.
            fetches = fetch.to(pool for pool in self.by_pool if pool not in pools)
            least_ns = max(self.book.order[0][0] - now_ns, 0)
            for pool in _first(fetches, lambda each: bound(least_ns, fewest, each)):
                if bound(least_ns, fewest, fetches[pool]) <= best.score:
                    break
                pools.add(pool)
                del fetches[pool]
                for place in self.book.places(self.by_pool[pool]):
                    look(place, self.book.wait_ns(place[1], now_ns))
            most = any_of(fetches.values())
        until_ns, most_open, score = -1, 0, 0.0
        for place in self.book.order:
            free_at_ns, name = place
            if free_at_ns > until_ns or score != best.score:
                until_ns, score = max(free_at_ns, now_ns), best.score
                least_ns = until_ns - now_ns
                # Those behind wait longer.
                if best.num_looks >= LOOKS_MAX or best.beats(bound(least_ns, fewest, most), place):
                    break
                most_open = bound.num_open_max(least_ns, score, most)
                most_open -= best.beats(bound(least_ns, most_open, most), place)
            if num_open[name] <= most_open and (pool := self.instances[name].pool) not in pools:
                if closed and (pool, self.instances[name].layout_id) in closed:
                    continue
                wait_ns = self.book.wait_ns(name, now_ns)
                if not best.beats(bound(wait_ns, num_open[name], fetches.get(pool)), place):
                    look(place, wait_ns)
        return best.picked

    def _holders(self, arrival: Arrival) -> tuple[set[str], int]:
        """Pools with the longest prefixes, in them or in one of their instances, and the longest
        prefix of all others, tokens."""
        held = dict[str, int]()
        for hits in (arrival.hits, arrival.hints):
            for num_tokens, name in islice(longest_first(hits, self.sources), HOLDERS_MAX + 1):
                held[name] = max(num_tokens, held.get(name, 0))
        found = sorted(held, key=held.__getitem__, reverse=True)
        rest = held[found[HOLDERS_MAX]] if len(found) > HOLDERS_MAX else 0
        longest = [source for source in found[:HOLDERS_MAX] if held[source] > rest]
        pools = {self.instances[name].pool for name in longest if name in self.instances}
        return pools | (self.by_pool.keys() & longest), rest

    def last_like(
        self, chosen: Candidate, arrival: Arrival, now_ns: int, wait_ns_max: int
    ) -> Candidate:
        """The busiest instance that may stand in for a chosen one: same pool and layout.

        Args:
            chosen: The instance.
            arrival: The request.
            now_ns: Time.
            wait_ns_max: Instances with longer queues do not stand in.
        """
        like = self.instances[chosen.name]
        peers = (
            name
            for name in self.by_pool[like.pool]
            if self.instances[name].layout_id == like.layout_id
            and self.instances[name].num_tokens_max >= like.num_tokens_max
        )
        name = self.book.last(peers, now_ns + wait_ns_max) or chosen.name
        wait_ns, hits = self.book.wait_ns(name, now_ns), arrival.hits
        device = hits.get(name, 0)
        hit = max(hits.get(like.pool, 0), device)
        if chosen.pulled_from:
            hit = max(hit, chosen.hit_tokens)
        return chosen._replace(name=name, wait_ns=wait_ns, hit_tokens=hit, device_tokens=device)

    def _kind(self, name: str, arrival: Arrival) -> _Kind:
        """Facts that instances share which differ by wait and open requests alone."""
        instance, device = self.instances[name], arrival.hits.get(name, 0)
        longest = instance.num_tokens_max
        return instance.pool, instance.layout_id, longest, device, instance.within

    def _candidate(
        self,
        arrival: Arrival,
        name: str,
        wait_ns: int | None,
        reach: Reach | None,
        fetch: FetchTo | None,
    ) -> Candidate:
        instance, hits, hints = self.instances[name], arrival.hits, arrival.hints
        pool = instance.pool
        held, device = hits.get(pool, 0), hits.get(name, 0)
        agree, link_up, adds = (True, True, True) if reach is None else reach(instance)
        hit, source = held if held > device else device, ""
        found = fetch(pool, hit, wait_ns) if fetch is not None and agree and link_up else None
        if found is not None:
            source, hit, arrival_ns = found
            wait_ns = arrival_ns if wait_ns is None else max(wait_ns, arrival_ns)
        return Candidate(
            name,
            name != arrival.avoid,
            wait_ns,
            hit,
            hints.get(pool, 0) if hints else 0,
            self._num_open[name],
            instance.num_tokens_max,
            agree,
            link_up,
            device,
            source,
            adds,
        )

    def _candidates(
        self, arrival: Arrival, now_ns: int, reach: Reach | None, fetch: FetchTo | None
    ) -> Iterator[Candidate]:
        hits, least_open = arrival.hits, dict[_Kind, int]()
        for name, wait_ns in self.book.in_order(now_ns):
            instance, decodes = self.instances[name], self._num_open[name]
            kind = (
                instance.pool,
                instance.layout_id,
                instance.num_tokens_max,
                hits.get(name, 0),
                instance.within,
            )
            # Behind one of its kind that decodes no more, an instance is never the better one.
            if least_open and decodes >= least_open.get(kind, OPEN_MAX):
                continue
            yield self._candidate(arrival, name, wait_ns, reach, fetch)
            if name != arrival.avoid and wait_ns is not None:
                least_open[kind] = decodes
