"""The prefill instances of one cluster, and the selection of one for a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import compress, islice, zip_longest
from operator import itemgetter

from prfaas.core.dispatch.hosts import FetchTo
from prfaas.core.dispatch.instance_load import InstanceLoad
from prfaas.core.dispatch.scoring import (
    BY_POOL,
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
from prfaas.core.dispatch.types import Arrival, ClusterMember
from prfaas.core.invariants import hold
from prfaas.core.kv.source_sets import SourceSet, by_length, longest_first
from prfaas.core.routing.decision import Reason


@dataclass(slots=True)
class Instance:
    """State of an instance without its load."""

    name: str
    pool: str
    """Place where its blocks are kept."""
    num_tokens_max: int = 2**31
    """Longest prompt it takes, tokens."""
    layout_id: bytes | None = b""
    """Layout of its blocks; None while unknown."""
    within: frozenset[str] = frozenset()
    """As of `ClusterMember`."""


SCANNED_MAX = 32
"""Up to so many instances, a look at each is faster than a search."""
HOLDERS_MAX = 4
"""Pools and instances with the longest prefixes that a search begins with."""
TRIED_MAX = 16
"""As of `PrefillInstances`."""
_Kind = tuple[str, bytes | None, int, int, frozenset[str]]

Reach = Callable[[Instance], tuple[bool, Reason | None, bool]]
"""Function of an instance: True if the layouts agree, one of `UNREACHABLE` or None, and True if it
has cores that the local instance lacks."""


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
        stale_after_ns: Age beyond which a report counts as unknown.
        weights: Of the scores of its instances.
        scanned_max: Up to so many instances, `pick` looks at each; beyond, it searches.
        tried_max: Instances without the longest prefix that a search tries before it turns to those
            that have it.
    """

    def __init__(
        self,
        members: Sequence[ClusterMember],
        stale_after_ns: int,
        weights: Weights = PREFILL_WEIGHTS,
        scanned_max: int = SCANNED_MAX,
        tried_max: int = TRIED_MAX,
    ) -> None:
        names, by_open = [member.name for member in members], weights.few_open > 0
        self.book = InstanceLoad(names, stale_after_ns, by_open=by_open)
        self.instances = {m.name: Instance(m.name, m.pool, within=m.within) for m in members}
        self.by_pool: dict[str, list[str]] = {}
        """Names of the instances of each pool."""
        self.pool_of: dict[str, str] = {}
        """Pools of the instances and of themselves."""
        for member in members:
            self.by_pool.setdefault(member.pool, []).append(member.name)
            self.pool_of[member.name] = self.pool_of[member.pool] = member.pool
        self.sources = SourceSet([*self.by_pool, *self.instances])
        """Its pools and instances, as holders of prefixes."""
        self.weights, self._scanned_max, self.tried_max = weights, scanned_max, tried_max
        self.num_open = self.book.num_open

    def add(self, member: ClusterMember) -> None:
        """Add an instance, which is not ready and has no known layout."""
        self.book.add(member.name)
        self.instances[member.name] = Instance(member.name, member.pool, 0, None, member.within)
        self.by_pool.setdefault(member.pool, []).append(member.name)
        self.pool_of[member.name] = self.pool_of[member.pool] = member.pool
        self.sources.add(member.name)
        self.sources.add(member.pool)

    def remove(self, name: str, now_ns: int) -> None:
        """Forget an instance that has no requests."""
        self.book.remove(name, now_ns)
        pool = self.instances.pop(name).pool
        del self.pool_of[name]
        self.by_pool[pool].remove(name)
        self.sources.discard(name)
        if not self.by_pool[pool]:
            del self.by_pool[pool]
            self.pool_of.pop(pool, None)
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
        first = self.book.first(now_ns)
        return None if first is None else first[1]

    def enter(self, name: str) -> None:
        """An instance has one more request to decode."""
        self.book.enter(name)

    def leave(self, name: str) -> None:
        """An instance has one request less to decode."""
        self.book.enter(name, -1)

    def pick(
        self,
        arrival: Arrival,
        now_ns: int,
        reach: Reach | None = None,
        fetch: FetchTo | None = None,
        is_cut: Callable[[], bool] | None = None,
    ) -> Pick:
        """Candidates for a prompt.

        Args:
            reach: From an instance to where its blocks are wanted; None when they stay.
            fetch: What an instance's host can fetch from another one; None if nothing.
            is_cut: Returns True if no link is up from any instance to where the blocks are wanted;
                called if many are, so that not all are considered.
        """
        hits, hints, most, most_device = arrival.hits, arrival.hints, 0, 0
        if hits or hints:
            if len(self.book.order) > self._scanned_max:
                return self.search(arrival, now_ns, reach, fetch, is_cut)
            for source in hits:
                if source in self.instances and hits[source] > most_device:
                    most_device = hits[source]
            most = most_device
            for pool in self.by_pool:
                most = max(most, hits.get(pool, 0))
                if hints:
                    most = max(most, hints.get(pool, 0))
        num_tokens = arrival.num_tokens_to_fit
        first = self.book.first(now_ns)
        if first is not None:
            name, wait_ns = first
            candidate = self.candidate(arrival, name, wait_ns, reach, fetch)
            if is_ideal(candidate, num_tokens, most, most_device):
                return Pick(candidate, None, (candidate,))
        if len(self.book.order) > self._scanned_max:
            return self.search(arrival, now_ns, reach, fetch, is_cut)
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
        is_cut: Callable[[], bool] | None = None,
    ) -> Pick:
        """The choice of a scan, where most instances are never looked at.

        Those with the longest prefixes come first. How good another one could be follows from its
        wait and its open requests.
        """
        return _Search(self, arrival, now_ns, reach, fetch, is_cut).run()

    def last_like(
        self, chosen: Candidate, arrival: Arrival, now_ns: int, wait_ns_max: int
    ) -> Candidate:
        """The busiest instance that may stand in for a chosen one: same pool and layout.

        Args:
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

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        pools = [(name, pool) for pool, names in self.by_pool.items() for name in names]
        hold(
            every_instance_is_in_its_pool=sorted(pools)
            == sorted((name, each.pool) for name, each in self.instances.items()),
            every_instance_is_counted=self.num_open.keys() == self.instances.keys(),
        )
        self.book.validate()

    def kind(self, name: str, arrival: Arrival) -> _Kind:
        """Facts that instances share which differ by wait and open requests alone."""
        instance, device = self.instances[name], arrival.hits.get(name, 0)
        longest = instance.num_tokens_max
        return instance.pool, instance.layout_id, longest, device, instance.within

    def candidate(
        self,
        arrival: Arrival,
        name: str,
        wait_ns: int | None,
        reach: Reach | None,
        fetch: FetchTo | None,
    ) -> Candidate:
        """An instance as a candidate for a prompt."""
        instance, hits, hints = self.instances[name], arrival.hits, arrival.hints
        pool = instance.pool
        held, device = hits.get(pool, 0), hits.get(name, 0)
        agree, unreachable, adds = (True, None, True) if reach is None else reach(instance)
        hit, source = held if held > device else device, ""
        found = None
        if fetch is not None and agree and unreachable is None:
            found = fetch(pool, hit, wait_ns)
        if found is not None:
            source, hit, arrival_ns = found
            wait_ns = arrival_ns if wait_ns is None else max(wait_ns, arrival_ns)
        return Candidate(
            name,
            name != arrival.avoid,
            wait_ns,
            hit,
            hints.get(pool, 0) if hints else 0,
            self.num_open[name],
            instance.num_tokens_max,
            agree,
            unreachable,
            device,
            source,
            adds,
        )

    def _candidates(
        self, arrival: Arrival, now_ns: int, reach: Reach | None, fetch: FetchTo | None
    ) -> Iterator[Candidate]:
        hits, least_open = arrival.hits, dict[_Kind, int]()
        for name, wait_ns in self.book.in_order(now_ns):
            instance, decodes = self.instances[name], self.num_open[name]
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
            yield self.candidate(arrival, name, wait_ns, reach, fetch)
            if name != arrival.avoid and wait_ns is not None:
                least_open[kind] = decodes


class _Search:
    """The choice of a scan, where most instances are never looked at.

    Those with the longest prefixes come first, then the others in the order of their wait. How good
    another one could be follows from its wait and its open requests.

    Args:
        reach: As of `PrefillInstances.pick`.
        fetch: As of `PrefillInstances.pick`.
        is_cut: As of `PrefillInstances.pick`.
    """

    def __init__(
        self,
        stage: PrefillInstances,
        arrival: Arrival,
        now_ns: int,
        reach: Reach | None,
        fetch: FetchTo | None,
        is_cut: Callable[[], bool] | None,
    ) -> None:
        self._stage, self._book, self._arrival, self._now_ns = stage, stage.book, arrival, now_ns
        self._reach, self._fetch = reach, fetch
        self._best = Best(arrival.num_tokens_to_fit, stage.weights)
        self._ahead = dict[_Kind, tuple[int, tuple[int, str]]]()
        """Open requests and place of the last one of each kind."""
        self._closed = set[tuple[str, bytes | None]]()
        self._pools = set[str]()
        """Pools all of whose instances were looked at."""
        self._fewest = next((n for n, level in enumerate(stage.book.levels) if level), 0)
        self._rest = 0
        """Longest prefix of the instances of all other pools, tokens."""
        self._fetches = dict[str, Fetched]()
        """Prefixes that pools of them can fetch."""
        self._most: Fetched | None = None
        """Upper bound of that."""
        self._starts = dict[int, int]()
        """Place of the scan in each level of the instances."""
        self._is_cut = is_cut
        """None once it was called."""
        self._is_over = False
        """True if no further candidate changes the result."""

    def run(self) -> Pick:
        """The result."""
        longest, self._rest = self._longest()
        self._look_at(longest)
        bound, levels = self._bound(), None
        while not self._scan(bound):
            levels = levels or self._levels()
            holders, self._rest = next(levels)
            self._look_among(holders - self._pools, bound)
            bound = self._bound()
        return self._best.picked

    def _look(self, place: tuple[int, str], wait_ns: int | None) -> None:
        name = place[1]
        stage, arrival, decodes = self._stage, self._arrival, self._stage.num_open[name]
        kind = stage.kind(name, arrival)
        num_open, before = self._ahead.get(kind, (OPEN_MAX, place))
        # Behind one of its kind that decodes no more, an instance is never the better one.
        if (num_open <= decodes and before < place) or kind[:2] in self._closed:
            return
        candidate = stage.candidate(arrival, name, wait_ns, self._reach, self._fetch)
        if self._best.look(candidate, place) in BY_POOL:
            self._closed.add(kind[:2])
            if self._best.shows_link_down and self._is_cut is not None:
                self._is_over, self._is_cut = self._is_cut(), None
        if name != arrival.avoid and wait_ns is not None:
            self._ahead[kind] = decodes, place

    def _look_at(self, pools: Collection[str]) -> None:
        """Look at the instances of a few pools."""
        by_pool, book = self._stage.by_pool, self._book
        for place in book.places(name for pool in pools for name in by_pool[pool]):
            self._look(place, book.wait_ns(place[1], self._now_ns))
        self._pools.update(pools)

    def _look_among(self, pools: Collection[str], bound: Bound) -> None:
        """Look at the instances of many pools in order, while they may be the best."""
        book, now_ns, pool_of = self._book, self._now_ns, self._stage.pool_of
        pool_at = map(pool_of.__getitem__, map(itemgetter(1), book.order))
        for place in compress(book.order, map(pools.__contains__, pool_at)):
            least = bound(max(place[0] - now_ns, 0), self._fewest, self._most)
            if self._is_over or self._best.beats(least, place):
                break
            self._look(place, book.wait_ns(place[1], now_ns))
        self._pools.update(pools)

    def _bound(self) -> Bound:
        """Highest scores of all that were not looked at; looks at what fetches the longest prefix
        over the best links."""
        stage, best, fetch, fewest = self._stage, self._best, self._fetch, self._fewest
        bound = Bound(self._arrival.num_tokens_to_fit, stage.weights, self._rest)
        self._fetches = {}
        most = self._most = None if fetch is None else fetch.beyond(self._rest)
        if fetch and most and self._book.order and best.score <= bound(0, fewest, most):
            others = (pool for pool in stage.by_pool if pool not in self._pools)
            fetches = self._fetches = fetch.to(others)
            least_ns = max(self._book.order[0][0] - self._now_ns, 0)
            for pool in _first(fetches, lambda each: bound(least_ns, fewest, each)):
                if bound(least_ns, fewest, fetches[pool]) <= best.score:
                    break
                del fetches[pool]
                self._look_at([pool])
            self._most = any_of(fetches.values())
        return bound

    def _scan(self, bound: Bound) -> bool:
        """Look at the others in the order of their wait, those with few requests to decode before
        those with more; False if the first `tried_max` of them do not have the longest prefix that
        is left, and others do."""
        best, book, now_ns, most, num_tried = (
            self._best, self._book, self._now_ns, self._most, 0
        )  # fmt: skip
        instances, closed = self._stage.instances, self._closed
        least_ns = max(book.order[0][0] - now_ns, 0) if book.order else 0
        for num_open, level in enumerate(book.levels):
            if level and bound(least_ns, num_open, most) < best.score:
                break
            until_ns, num_looks, start = -1, best.num_looks, self._starts.get(num_open, 0)
            for at, place in enumerate(islice(level, start, None), start):
                free_at_ns, name = place
                if free_at_ns > until_ns or num_looks != best.num_looks:
                    until_ns, num_looks = max(free_at_ns, now_ns), best.num_looks
                    if num_looks >= LOOKS_MAX:
                        return True
                    # Those behind wait longer.
                    if best.beats(bound(until_ns - now_ns, num_open, most), place):
                        break
                if (pool := instances[name].pool) in self._pools:
                    continue
                if closed and (pool, instances[name].layout_id) in closed:
                    continue
                if self._rest and num_tried >= self._stage.tried_max:
                    self._starts[num_open] = at
                    return False
                if self._is_over:
                    return True
                num_tried += 1
                wait_ns = book.wait_ns(name, now_ns)
                if not best.beats(bound(wait_ns, num_open, self._fetches.get(pool)), place):
                    self._look(place, wait_ns)
        return True

    def _longest(self) -> tuple[Collection[str], int]:
        """Pools with the longest prefixes, in them or in one of their instances, and the longest
        prefix of all others, tokens."""
        held, stage, arrival = dict[str, int](), self._stage, self._arrival
        for hits in (arrival.hits, arrival.hints):
            for num_tokens, name in islice(longest_first(hits, stage.sources), HOLDERS_MAX + 1):
                held[name] = max(num_tokens, held.get(name, 0))
        found = sorted(held, key=held.__getitem__, reverse=True)
        rest = held[found[HOLDERS_MAX]] if len(found) > HOLDERS_MAX else 0
        longest = [source for source in found[:HOLDERS_MAX] if held[source] > rest]
        instances, by_pool = stage.instances, stage.by_pool
        pools = {instances[name].pool for name in longest if name in instances}
        return pools | (by_pool.keys() & longest), rest

    def _levels(self) -> Iterator[tuple[set[str], int]]:
        """Pools with each prefix that is left, the longest first, and the one after it; 0 after the
        last."""
        stage, arrival, rest = self._stage, self._arrival, self._rest
        held = list(by_length(arrival.hits, stage.sources))
        if arrival.hints:
            held += by_length(arrival.hints, stage.sources)
            held.sort(key=itemgetter(0), reverse=True)
        pools = set[str]()
        for num_tokens, names in held:
            if num_tokens < rest:
                yield pools, num_tokens
                pools, rest = set(), num_tokens
            pools.update(map(stage.pool_of.__getitem__, names))
        yield pools, 0
