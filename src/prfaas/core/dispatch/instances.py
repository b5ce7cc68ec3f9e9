"""The prefill instances of one cluster, and the selection of one for a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prfaas.core.dispatch.hosts import FetchTo
from prfaas.core.dispatch.instance_load import LoadBook
from prfaas.core.dispatch.scoring import PREFILL_WEIGHTS, Candidate, Pick, Weights, is_ideal, pick
from prfaas.core.dispatch.types import Arrival, Member


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


FAR_TOO_MANY = 2**63
"""More requests than any instance decodes."""

Reach = Callable[[Instance], tuple[bool, bool, bool]]
"""Function of an instance: do the layouts agree, does a link connect the pools, and does it have
cores that the local instance lacks?"""


class PrefillInstances:
    """The prefill instances of one cluster, in the order of their load.

    Args:
        members: The instances.
        stale_after_ns: Age beyond which a report counts as unknown.
        weights: Of the scores of its instances.
    """

    def __init__(
        self,
        members: Sequence[Member],
        stale_after_ns: int,
        weights: Weights = PREFILL_WEIGHTS,
    ) -> None:
        self.book = LoadBook([member.name for member in members], stale_after_ns)
        self.instances = {m.name: Instance(m.name, m.pool, within=m.within) for m in members}
        self.pools = tuple(dict.fromkeys(m.pool for m in members))
        self.weights = weights
        self._num_open = dict.fromkeys(self.instances, 0)

    def add(self, member: Member) -> None:
        """Add an instance, which is not ready and has no known layout."""
        self.book.add(member.name)
        self.instances[member.name] = Instance(member.name, member.pool, 0, None, member.within)
        self._num_open[member.name] = 0
        self._find_pools()

    def remove(self, name: str, now_ns: int) -> None:
        """Forget an instance that has no requests."""
        self.book.remove(name, now_ns)
        del self.instances[name], self._num_open[name]
        self._find_pools()

    def _find_pools(self) -> None:
        self.pools = tuple(dict.fromkeys(each.pool for each in self.instances.values()))

    @property
    def first_pool(self) -> str:
        """Pool of the first instance; "" without any."""
        return self.pools[0] if self.pools else ""

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
        hits, hints, most, most_device = arrival.hits, arrival.hints, 0, 0
        for source in hits:
            if source in self.instances and hits[source] > most_device:
                most_device = hits[source]
        for pool in self.pools if hits or hints else ():
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
            i.name
            for i in self.instances.values()
            if (i.pool, i.layout_id) == (like.pool, like.layout_id)
            and i.num_tokens_max >= like.num_tokens_max
        )
        name = self.book.last(peers, now_ns + wait_ns_max) or chosen.name
        wait_ns, hits = self.book.wait_ns(name, now_ns), arrival.hits
        device = hits.get(name, 0)
        hit = max(hits.get(like.pool, 0), device)
        if chosen.pulled_from:
            hit = max(hit, chosen.hit_tokens)
        return chosen._replace(name=name, wait_ns=wait_ns, hit_tokens=hit, device_tokens=device)

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
        if fetch is not None and (found := fetch(pool, hit, wait_ns)) is not None:
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
        hits = arrival.hits
        least_open: dict[tuple[str, bytes | None, int, int, frozenset[str]], int] = {}
        for name, wait_ns in self.book.in_order(now_ns):
            instance, decodes = self.instances[name], self._num_open[name]
            # Behind one of its kind that decodes no more, an instance is never the better one.
            kind = (
                instance.pool,
                instance.layout_id,
                instance.num_tokens_max,
                hits.get(name, 0),
                instance.within,
            )
            if least_open and decodes >= least_open.get(kind, FAR_TOO_MANY):
                continue
            yield self._candidate(arrival, name, wait_ns, reach, fetch)
            if name != arrival.avoid and wait_ns is not None:
                least_open[kind] = decodes
