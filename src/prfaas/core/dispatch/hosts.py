"""Hosts of a cluster: prefixes that one fetches from another, and the PD host that decodes.

    prefix on C ──pull──► prefill on A ──hand-off──► decode on B

Every host has a pool. A hit of any of them is a hit of a prefill anywhere in the cluster, after the
time of its transfer; a transfer that takes longer than computing the prefix is not made. Links
inside a cluster have no price, and a rate that is assumed until it is measured. A and C are of one
cluster, PD or PrfaaS; B is of the PD cluster. Pure.

Free memory in destination pools for blocks in transit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from prfaas.core.dispatch.links import Links
from prfaas.core.dispatch.scoring import MIXED_WEIGHTS, Candidate, Fetched, score
from prfaas.core.dispatch.types import Arrival
from prfaas.core.invariants import hold
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import shipped_bytes
from prfaas.core.kv.source_sets import SourceSet, longest_first
from prfaas.core.routing.policies import PullSettings, choose_pull, gain_ns_max
from prfaas.core.routing.predictions import CostModel, LinkState
from prfaas.units import NS_PER_S

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
        if request_id in self._by_request:
            pool, num_bytes = self._by_request.pop(request_id)
            self._taken[pool] -= num_bytes

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        taken = Counter[str]()
        for pool, num_bytes in self._by_request.values():
            taken[pool] += num_bytes
        hold(taken_bytes_are_those_of_requests=taken == Counter(self._taken))

    @property
    def taken_bytes(self) -> int:
        """Bytes in transit to all pools; 0 when nothing is."""
        return sum(self._taken.values())


HOLDERS_MAX = 4
"""Pools with the longest prefixes that are considered as the source of a pull."""
RATED_MAX = 16
"""Pools with the fewest requests that are considered for decode, where there are more. Another one
has more requests than all of these, so it could only be better by a much shorter hand-off, which is
that of the pool that prefills or has the prefix; these are considered as well."""
PULLS = PullSettings(margin_ratio=0.05, margin_ns=NS_PER_S // 1000)
"""Gain from which a prefix is fetched from another host: no price and a short way."""


_Lengths = tuple[int, int]
"""A longer and a shorter prefix, tokens."""
Gain = tuple[int | None, int]


class Fetch(NamedTuple):
    """A prefix that a host fetches from another one before prefill."""

    source: str
    """Pool that has it."""
    hit_tokens: int
    """Length of the prefix."""
    arrival_ns: int
    """From now until it is there."""


class Hosts:
    """Pools of a cluster, and transfers between them.

    Args:
        rooms: Free memory of PD pools.
        prefill_ns: Expected time of a prefill in the cluster without queue, by its new tokens, its
            cached prefix and the time; None is unknown.
        costs: Of the cluster; None without profiles.
    """

    def __init__(
        self,
        pools: Sequence[str],
        links: Links,
        rooms: DestinationMemory,
        prefill_ns: Callable[[int, int, int], int | None],
        costs: CostModel | None,
    ) -> None:
        self.pools = SourceSet(pools)
        self.links, self._rooms, self.local_ns = links, rooms, prefill_ns
        self.costs = costs
        """Of the cluster; None without profiles."""

    def add(self, pool: str) -> None:
        """A host joins, unless it is there."""
        self.pools.add(pool)

    def remove(self, pool: str) -> None:
        """Forget a host; no effect if it is not there."""
        self.pools.discard(pool)

    def fetch(self, arrival: Arrival, now_ns: int) -> FetchTo | None:
        """Prefixes of a request that hosts can fetch; None if no pool has one."""
        hits = arrival.hits
        if len(self.pools.names) < 2 or not hits:
            return None
        longest = islice(longest_first(hits, self.pools), HOLDERS_MAX)
        holders = [(hit, pool) for hit, pool in longest if hit]
        return FetchTo(self, arrival, holders, now_ns) if holders else None

    def longest(self, arrival: Arrival, destination: str) -> tuple[int, str]:
        """Longest prefix in a pool with a link to `destination` that is up, tokens, and the pool;
        "" without any."""
        held, between = longest_first(arrival.hits, self.pools), self.links.between
        return next((each for each in held if between(each[1], destination).up), (0, ""))

    def decode_pool(
        self,
        arrival: Arrival,
        prefill_pool: str,
        num_open: Mapping[str, int],
        now_ns: int,
    ) -> str:
        """The pool that a request is decoded from: few requests, and a short way to it.

        Args:
            prefill_pool: Pool of the instance that would prefill; "" without one.
            num_open: Requests of the least loaded instance of each pool with a ready one.
        """
        if len(num_open) < 2:
            return next(iter(num_open), prefill_pool)

        def rated(pool: str) -> tuple[bool, float]:
            wait_ns = self.hand_off_ns(arrival, prefill_pool, pool, now_ns)
            found = Candidate(pool, wait_ns=wait_ns, num_open=num_open[pool])
            present = arrival.hits.get(pool, 0)
            fits = self._rooms.fits(pool, arrival.layout, present, arrival.shippable_tokens or 0)
            return fits or pool == prefill_pool, score(found, 0, MIXED_WEIGHTS)

        pools: Iterable[str] = num_open
        if len(num_open) > RATED_MAX:
            few = nsmallest(RATED_MAX, num_open, key=num_open.__getitem__)
            held = islice(longest_first(arrival.hits, self.pools), HOLDERS_MAX)
            likely = dict.fromkeys((prefill_pool, *(pool for _, pool in held), *few))
            pools = (pool for pool in likely if pool in num_open)
        return max(pools, key=rated)

    def hand_off_ns(
        self, arrival: Arrival, source: str, destination: str, now_ns: int
    ) -> int | None:
        """Time in which a link inside the cluster carries the blocks that decode lacks.

        Returns:
            0 within a pool; None if the link is down or its state unknown.
        """
        if not source or source == destination:
            return 0
        link = self.links.between(source, destination)
        state = link.book.latest(now_ns)
        if not link.up or state is None:
            return None
        present = arrival.hits.get(destination, 0)
        final = arrival.shippable_tokens
        if final is None:
            final = arrival.num_prompt_tokens
        return round(state.drain_ns(self.num_bytes(arrival, present, final))) + state.rtt_ns

    def tail_ns(self, arrival: Arrival, source: str, destination: str, now_ns: int) -> int:
        """Time from the end of a prefill until decode has the last blocks; 0 is unknown."""
        state = self.links.between(source, destination).book.latest(now_ns)
        if self.costs is None or state is None:
            return 0
        present = arrival.hits.get(destination, 0)
        num_bytes = self.costs.tail_bytes(arrival.num_prompt_tokens, present)
        return round(state.drain_ns(num_bytes)) + state.rtt_ns

    def num_bytes(self, arrival: Arrival, have_tokens: int, final_tokens: int) -> int:
        """Bytes of the blocks between two lengths of a prompt; 0 if nothing is known of them."""
        if final_tokens <= have_tokens:
            return 0
        if self.costs is not None:
            return self.costs.shipped_bytes(final_tokens, have_tokens)
        if arrival.layout is None:
            return 0
        return shipped_bytes(arrival.layout, have_tokens=have_tokens, final_tokens=final_tokens)

    def choose(
        self,
        arrival: Arrival,
        there: tuple[str, int],
        here: tuple[str, int],
        wait_ns: int | None,
        now_ns: int,
    ) -> Fetch | None:
        """The fetch of a longer prefix, by source and tokens, to a pool with a shorter one; None to
        compute it. `wait_ns` is that for the instance."""
        source, there_tokens = there
        pool, here_tokens = here
        state = self.links.between(source, pool).book.latest(now_ns)
        num_bytes = self.num_bytes(arrival, arrival.hits.get(pool, 0), there_tokens)
        if self.local_ns(there_tokens, 0, now_ns) is None and state is not None:
            # Nothing is known of prefill: any transfer inside a cluster is taken to be faster.
            return Fetch(source, there_tokens, round(state.drain_ns(num_bytes)) + state.rtt_ns)
        pull = choose_pull(
            arrival.num_prompt_tokens,
            here_tokens,
            there_tokens,
            wait_ns=wait_ns,
            prefill_ns=lambda new, prefix: self.local_ns(new, prefix, now_ns) or 0,
            num_bytes=num_bytes,
            link=state,
            settings=PULLS,
        )
        return None if pull is None else Fetch(source, there_tokens, pull.arrival_ns)


class FetchTo:
    """Prefixes of one prompt that the hosts of a site can fetch.

    Args:
        holders: The longest prefixes and their pools, the longest first; at least one.
    """

    __slots__ = ("_arrival", "_holders", "_hosts", "_now_ns")

    def __init__(
        self, hosts: Hosts, arrival: Arrival, holders: Sequence[tuple[int, str]], now_ns: int
    ) -> None:
        self._hosts, self._arrival, self._holders, self._now_ns = hosts, arrival, holders, now_ns

    def __call__(self, pool: str, here: int, wait_ns: int | None) -> Fetch | None:
        """The prefix that a pool fetches.

        Args:
            here: Prefix that its instance has, tokens.
            wait_ns: Wait for that instance; None is unknown.
        """
        links = self._hosts.links
        for there, source in self._holders:
            if there <= here:
                return None
            if source != pool and links.between(source, pool).up:
                way = (source, there), (pool, here)
                return self._hosts.choose(self._arrival, *way, wait_ns, self._now_ns)
        return None

    def beyond(self, here: int) -> Fetched | None:
        """Prefix for pools that have at most `here` tokens; None if nothing is longer.

        The fastest link carries it without queue.
        """
        arrival, hosts = self._arrival, self._hosts
        longest = self._holders[0][0]
        if hosts.local_ns(longest, 0, self._now_ns) is None:
            # All fetch what they can, also those whose wait is unknown, which is the worst one.
            return Fetched(longest, 0, needs_wait=False)
        longer = [there for there, _ in self._holders if there > here]
        if not longer:
            return None
        num_bytes = hosts.num_bytes(arrival, here, longer[-1])
        fastest = LinkState(hosts.links.fastest_bits_per_s)
        return Fetched(longest, round(fastest.drain_ns(num_bytes)), needs_wait=True)

    def to(self, pools: Iterable[str]) -> dict[str, Fetched]:
        """Prefix for each pool, by the state of its link; pools that cannot fetch are left out."""
        arrival, hosts, now_ns = self._arrival, self._hosts, self._now_ns
        find, hits, gains, found = hosts.links.find, arrival.hits, dict[_Lengths, Gain](), {}
        for pool in pools:
            here = hits.get(pool, 0)
            for there, source in self._holders:
                if there <= here:
                    break
                if source == pool or (link := find(source, pool)) is None or not link.up:
                    continue
                if (state := link.book.latest(now_ns)) is None:
                    break
                if (lengths := (there, here)) not in gains:
                    gains[lengths] = self._gain(there, here)
                gain_ns, num_bytes = gains[lengths]
                arrival_ns = round(state.drain_ns(num_bytes)) + state.rtt_ns
                if gain_ns is None or gain_ns > 0:
                    found[pool] = Fetched(there, arrival_ns, needs_wait=gain_ns is not None)
                break
        return found

    def _gain(self, there: int, here: int) -> Gain:
        """Time that a longer prefix saves at most, None if it is not known, and its bytes."""
        arrival, hosts, now_ns = self._arrival, self._hosts, self._now_ns
        num_tokens, num_bytes = arrival.num_prompt_tokens, hosts.num_bytes(arrival, here, there)
        if hosts.local_ns(there, 0, now_ns) is None:
            return None, num_bytes
        whole_ns = hosts.local_ns(num_tokens - here, here, now_ns) or 0
        rest_ns = hosts.local_ns(num_tokens - there, there, now_ns) or 0
        return gain_ns_max(whole_ns, rest_ns, PULLS), num_bytes
