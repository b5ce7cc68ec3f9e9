"""Fair queueing between sites in front of the engines that they share. Pure.

An engine serves requests first come first served: a site that sends ten times as much gets ten
times as much. Here requests wait by site, and an engine gets only as many at a time as keep it
busy. This is start-time fair queueing: a request starts at the virtual time at which its site's
previous one ends, its length is the tokens that are computed divided by the site's share, and the
least start is next. Times are those of all engines together, so that a site which wants a single
engine gets its share of all of them there, as far as that engine has it.

A site that is alone gets everything. One that was idle starts with the site that is least ahead:
it has no credit from that time. One that wants less than its share of all engines, since it wants
only some of them, falls behind by LAG_MAX at most. A request is charged with its whole prompt when
it starts; what was cached is given back when it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.admission.quotas import Bucket
from prfaas.core.sharing.contracts import Contract
from prfaas.units import NS_PER_S

RATE_WINDOW_NS = 10 * NS_PER_S
"""A site with a limited rate may use so much of it at once."""


LAG_MAX = 2_000_000.0
"""Tokens of all sites together that a site may be behind."""


class Why(StrEnum):
    """Reason for the refusal of a request; labels a metric."""

    NO_CONTRACT = "no_contract"
    QUEUE_FULL = "queue_full"


@dataclass(slots=True)
class _Job:
    site: str
    engine: str
    tokens: int
    is_running: bool = False


@dataclass(slots=True)
class _Site:
    contract: Contract
    bucket: Bucket | None
    start: float = 0.0
    """Virtual time at which its next request starts."""
    waiting: dict[str, deque[int]] = field(default_factory=dict)
    """Jobs by engine."""
    num_waiting: int = 0
    num_running: dict[str, int] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Return True if it has requests."""
        return bool(self.num_waiting) or any(self.num_running.values())


class EngineQueue:
    """Requests of sites that wait for engines, and those that run.

    Args:
        slots: Requests that each engine gets at a time, by its name.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._slots = dict(slots)
        self._free = dict(slots)
        self._sites: dict[str, _Site] = {}
        self._jobs: dict[int, _Job] = {}
        self._latest = 0.0
        """The latest start of a request."""
        self._shares = 1.0
        """Sum of the shares of all sites."""

    def agree(self, contracts: Iterable[Contract]) -> list[int]:
        """Set the contracts from now on.

        Returns:
            Jobs of sites without a contract, waiting or running: the caller ends them.
        """
        new = {each.site: each for each in contracts}
        self._shares = sum(each.share for each in new.values()) or 1.0
        for name, contract in new.items():
            known = self._sites.get(name)
            if known is None:
                self._sites[name] = _Site(contract, _bucket(contract), self._latest)
            elif known.contract != contract:
                if known.contract.tokens_per_s != contract.tokens_per_s:
                    known.bucket = _bucket(contract)
                known.contract = contract
        for name in [name for name in self._sites if name not in new]:
            del self._sites[name]
        return [number for number, job in self._jobs.items() if job.site not in new]

    def ask(self, job: int, site: str, engine: str, tokens: int) -> Why | None:
        """Have a request wait for its turn; return why it may not.

        Args:
            job: Unique among those that wait or run.
            site: Its site.
            engine: The engine that it is for.
            tokens: Of its prompt, at least 1.
        """
        known = self._sites.get(site)
        if known is None:
            return Why.NO_CONTRACT
        if known.num_waiting >= known.contract.queued_max:
            return Why.QUEUE_FULL
        if not known.is_active:
            known.start = max(known.start, self._least())
        self._jobs[job] = _Job(site, engine, tokens)
        known.waiting.setdefault(engine, deque()).append(job)
        known.num_waiting += 1
        return None

    def start(self, now_ns: int) -> list[int]:
        """Start the requests whose turn it is, for all engines with a free slot."""
        started: list[int] = []
        for engine in self._free:
            while self._free[engine] and (site := self._next(engine, now_ns)) is not None:
                started.append(self._begin(site, engine, now_ns))
        return started

    def wait_ns(self, now_ns: int) -> int | None:
        """Time until a site that is over its rate may go on; None if none waits for that."""
        waits = [
            site.bucket.wait_ns(now_ns)
            for site in self._sites.values()
            if site.bucket is not None and site.num_waiting
        ]
        return min((wait for wait in waits if wait), default=None)

    def leave(self, job: int, computed: int | None, now_ns: int) -> None:
        """Remove a request that has ended, or does not wait any longer.

        Args:
            job: The request.
            computed: Tokens that the engine computed for it; None if unknown, then all of its
                prompt. Not used for a request that has not started.
            now_ns: Time.
        """
        gone = self._jobs.pop(job)
        site = self._sites.get(gone.site)
        if gone.is_running:
            self._free[gone.engine] += 1
        if site is None:
            return
        if not gone.is_running:
            if job in (waiting := site.waiting.get(gone.engine, deque())):
                waiting.remove(job)
                site.num_waiting -= 1
            return
        site.num_running[gone.engine] = max(0, site.num_running.get(gone.engine, 0) - 1)
        if computed is not None and computed != gone.tokens:
            site.start += self._length(site, computed - gone.tokens)
            if site.bucket is not None:
                site.bucket.take(computed - gone.tokens, now_ns)

    def num_waiting(self, site: str) -> int:
        """Requests of a site that wait, for all engines."""
        known = self._sites.get(site)
        return known.num_waiting if known is not None else 0

    def waiting_of(self, site: str, engine: str) -> int:
        """Requests of a site that wait for an engine."""
        known = self._sites.get(site)
        return len(known.waiting.get(engine, ())) if known is not None else 0

    def running_of(self, site: str, engine: str) -> int:
        """Requests of a site that an engine has."""
        known = self._sites.get(site)
        return known.num_running.get(engine, 0) if known is not None else 0

    def _next(self, engine: str, now_ns: int) -> _Site | None:
        """The site with the least start among those that wait for an engine, within their rates."""
        ready = [
            site
            for site in self._sites.values()
            if site.waiting.get(engine) and (site.bucket is None or not site.bucket.wait_ns(now_ns))
        ]
        return min(ready, key=lambda site: site.start, default=None)

    def _least(self) -> float:
        """Start of the active site that is least ahead."""
        starts = [site.start for site in self._sites.values() if site.is_active]
        return min(starts, default=self._latest)

    def _length(self, site: _Site, tokens: int) -> float:
        return tokens * self._shares / site.contract.share

    def _begin(self, site: _Site, engine: str, now_ns: int) -> int:
        number = site.waiting[engine].popleft()
        job = self._jobs[number]
        job.is_running = True
        site.num_waiting -= 1
        site.num_running[engine] = site.num_running.get(engine, 0) + 1
        self._free[engine] -= 1
        self._latest = max(site.start, self._latest)
        site.start = max(site.start, self._latest - LAG_MAX) + self._length(site, job.tokens)
        if site.bucket is not None:
            site.bucket.take(job.tokens, now_ns)
        return number


def _bucket(contract: Contract) -> Bucket | None:
    rate = contract.tokens_per_s
    seconds = RATE_WINDOW_NS // NS_PER_S
    return Bucket(rate * seconds, RATE_WINDOW_NS) if rate is not None else None
