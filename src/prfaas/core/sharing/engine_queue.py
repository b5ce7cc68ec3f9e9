"""Fair queueing between sites in front of the engines that they share. Pure.

An engine serves requests first come first served: a site that sends ten times as much gets ten
times as much. Here requests wait by site, and an engine gets only as many at a time as keep it
busy. This is start-time fair queueing: a request starts at the virtual time at which its site's
previous one ends, its length is the tokens that are computed divided by the site's share, and the
least start is next. Times are those of all engines together, so that a site which wants a single
engine gets its share of all of them there, as far as that engine has it.

A site that is alone gets everything. One that wanted nothing of an engine begins there at the
virtual time that this engine has reached: it has no credit from before, whatever it did at other
engines. One that wants less than its share of all engines, since it wants only some of them, falls
behind by LAG_MAX at most.

A request is charged with its whole prompt when it starts; what was cached is given back when it has
ended. One that may keep an engine waiting, or that ends without an answer, is charged for its time
as well: the tokens that the engine computes in that time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.admission.contracts import Contract
from prfaas.core.admission.quotas import TokenBucket
from prfaas.units import NS_PER_S

RATE_WINDOW_NS = 10 * NS_PER_S
"""A site with a limited rate may use so much of it at once."""


LAG_MAX = 100_000.0
"""Tokens of all sites together that a site may be behind: a few prompts."""
SPEED_UNKNOWN = 1000.0
"""Prompt tokens per second of an engine that has not answered yet: a low one."""
SPEED_TOKENS_MIN = 512
"""Requests that compute less say nothing about speed: they could make time cheap."""
SMOOTHING = 0.1
"""Weight of the latest request in the average speed of an engine."""


class QueueRefusal(StrEnum):
    """Reason for the refusal of a request; labels a metric."""

    NO_CONTRACT = "no_contract"
    QUEUE_FULL = "queue_full"
    MEMORY = "memory"
    REFUSALS = "refusals"
    """Bodies that were read and refused have used up what the site may have of that."""


@dataclass(slots=True)
class _Job:
    site: str
    engine: str
    tokens: int
    can_wait: bool
    is_running: bool = False
    began_ns: int = 0


@dataclass(slots=True)
class _Site:
    contract: Contract
    bucket: TokenBucket | None
    start: float = 0.0
    """Virtual time at which its next request starts."""
    waiting: dict[str, deque[int]] = field(default_factory=dict)
    """Jobs by engine."""
    num_waiting: int = 0
    num_running: dict[str, int] = field(default_factory=dict)
    charged: int = 0
    """Tokens of requests that have ended."""

    def wants(self, engine: str) -> bool:
        """Return True if it has requests for an engine."""
        return bool(self.waiting.get(engine) or self.num_running.get(engine))


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
        self._reached = dict.fromkeys(slots, 0.0)
        """The latest start of a request at each engine."""
        self._speeds: dict[str, float] = {}
        """Tokens per second of each engine, for one request."""
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

    def refuses(self, site: str, coming: Mapping[str, int]) -> QueueRefusal | None:
        """Return why a site may not send what it sends; for use before a prompt is read.

        Args:
            coming: Requests of it that are not here yet, by engine. As many as there are free slots
                need no place in the queue.
        """
        known = self._sites.get(site)
        if known is None:
            return QueueRefusal.NO_CONTRACT
        free = known.contract.queued_max - known.num_waiting
        will_wait = sum(max(0, num - self._free[engine]) for engine, num in coming.items())
        return QueueRefusal.QUEUE_FULL if free <= 0 or will_wait > free else None

    def ask(
        self, job: int, site: str, engine: str, tokens: int, *, can_wait: bool = False
    ) -> QueueRefusal | None:
        """Have a request wait for its turn; return why it may not.

        Args:
            job: Unique among those that wait or run.
            tokens: Of its prompt, at least 1.
            can_wait: The engine may wait before it computes: time is charged as well.
        """
        if (why := self.refuses(site, {})) is not None:
            return why
        known = self._sites[site]
        if not known.wants(engine):
            known.start = max(known.start, self._reached[engine])
        self._jobs[job] = _Job(site, engine, tokens, can_wait)
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
            computed: Tokens that the engine computed for it; None if it ended without an answer:
                then all of its prompt, and its time. Not used for one that has not started.
        """
        gone = self._jobs.pop(job)
        site = self._sites.get(gone.site)
        cost = gone.tokens
        if gone.is_running:
            self._free[gone.engine] += 1
            cost = self._cost(gone, computed, now_ns - gone.began_ns)
        if site is None:
            return
        if not gone.is_running:
            if job in (waiting := site.waiting.get(gone.engine, deque())):
                waiting.remove(job)
                site.num_waiting -= 1
            return
        site.num_running[gone.engine] = max(0, site.num_running.get(gone.engine, 0) - 1)
        site.charged += cost
        if cost != gone.tokens:
            site.start += self._length(site, cost - gone.tokens)
            if site.bucket is not None:
                site.bucket.take(cost - gone.tokens, now_ns)

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

    def charged(self, site: str) -> int:
        """Tokens that the requests of a site were charged, once they had ended."""
        known = self._sites.get(site)
        return known.charged if known is not None else 0

    def _next(self, engine: str, now_ns: int) -> _Site | None:
        """The site with the least start among those that wait for an engine, within their rates."""
        ready = [
            site
            for site in self._sites.values()
            if site.waiting.get(engine) and (site.bucket is None or not site.bucket.wait_ns(now_ns))
        ]
        return min(ready, key=lambda site: site.start, default=None)

    def _cost(self, job: _Job, computed: int | None, held_ns: int) -> int:
        """Tokens to charge a request that ends; an answer also shows the speed of its engine."""
        speed, held_s = self._speeds.get(job.engine), held_ns / NS_PER_S
        if computed is None or job.can_wait:
            by_time = int(held_s * (speed or SPEED_UNKNOWN))
            return max(job.tokens if computed is None else computed, by_time)
        if computed >= SPEED_TOKENS_MIN and held_s > 0:
            now = computed / held_s
            self._speeds[job.engine] = now if speed is None else speed + SMOOTHING * (now - speed)
        return computed

    def _length(self, site: _Site, tokens: int) -> float:
        return tokens * self._shares / site.contract.share

    def _begin(self, site: _Site, engine: str, now_ns: int) -> int:
        number = site.waiting[engine].popleft()
        job = self._jobs[number]
        job.is_running, job.began_ns = True, now_ns
        site.num_waiting -= 1
        site.num_running[engine] = site.num_running.get(engine, 0) + 1
        self._free[engine] -= 1
        self._latest = max(site.start, self._latest)
        begins = max(site.start, self._latest - LAG_MAX)
        self._reached[engine] = max(begins, self._reached[engine])
        site.start = begins + self._length(site, job.tokens)
        if site.bucket is not None:
            site.bucket.take(job.tokens, now_ns)
        return number


def _bucket(contract: Contract) -> TokenBucket | None:
    rate = contract.tokens_per_s
    seconds = RATE_WINDOW_NS // NS_PER_S
    return TokenBucket(rate * seconds, RATE_WINDOW_NS) if rate is not None else None
