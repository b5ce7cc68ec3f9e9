"""Limits of a tenant: requests, tokens, concurrent requests, bytes on links. Pure.

A limit on a rate is a bucket that holds what may be used at once and fills evenly. What a request
costs is known only after it was admitted (its tokens are counted, its answer ends), so a request is
admitted while anything is left and is then counted in full: a bucket may go into debt, and nothing
more comes in until it is paid. Over time the rate is kept exactly, and no prompt is too long to
ever come in.

Output tokens that nobody has counted: an upper bound on what an abandoned answer took. Pure.

A limit on wrong operator keys. Right keys are never refused: a stranger locks nobody out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from prfaas.core.invariants import hold
from prfaas.units import NS_PER_S

MINUTE_NS = 60 * NS_PER_S
RETRY_IN_FLIGHT_NS = NS_PER_S
"""`Retry-After` above the limit of concurrent requests: the end of others is unknown."""
TOKENISED_PER_TOKEN = 16
"""Tokens that are only tokenised and count as one that is computed."""


def tokenising_cost(num_tokens: int) -> int:
    """Tokens that tokenising is charged as, rounded up, whatever becomes of the text."""
    return -(-num_tokens // TOKENISED_PER_TOKEN)


class Limit(StrEnum):
    """Limit that refuses a request; bounded, so that it can label a metric."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    IN_FLIGHT = "requests_in_flight"
    """Requests count by their sequences: prompts times answers to each."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of a tenant; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens together."""
    requests_in_flight: int | None = None
    link_bytes_per_s: int | None = None
    """Bytes of KV cache on all links together."""


@dataclass(frozen=True, slots=True)
class Over:
    """A request that would be over a limit."""

    limit: Limit
    allowed: int
    retry_after_ns: int
    """Time when something is left again."""


class TokenBucket:
    """A token bucket: its capacity is one period's units, and it starts full.

    Args:
        units: Units a period, at least 1.
    """

    def __init__(self, units: int, period_ns: int) -> None:
        self.units = units
        self._period_ns = period_ns
        # In units times nanoseconds, so that filling is exact.
        self._full = self._level = units * period_ns
        self._seen_at_ns: int | None = None

    def left(self, now_ns: int) -> int:
        """Whole units that are left; 0 in debt."""
        return max(0, self._at(now_ns) // self._period_ns)

    def take(self, amount: int, now_ns: int) -> None:
        """Use units, beyond what is left if need be; a negative amount gives some back."""
        self._at(now_ns)
        self._level = min(self._full, self._level - amount * self._period_ns)

    def wait_ns(self, now_ns: int) -> int:
        """Until at least one whole unit is left; 0 if there is one."""
        missing = self._period_ns - self._at(now_ns)
        return max(0, -(-missing // self.units))

    def full_in_ns(self, now_ns: int) -> int:
        """Until it is full."""
        return -(-(self._full - self._at(now_ns)) // self.units)

    @property
    def is_sound(self) -> bool:
        """Return True if it is not more than full."""
        return self._level <= self._full

    def _at(self, now_ns: int) -> int:
        if self._seen_at_ns is not None:
            passed_ns = max(0, now_ns - self._seen_at_ns)
            self._level = min(self._full, self._level + passed_ns * self.units)
        self._seen_at_ns = now_ns
        return self._level


class Quota:
    """Use of one tenant's limits."""

    def __init__(self, limits: TenantLimits) -> None:
        self.limits = limits
        self.num_in_flight = 0
        self.requests = _bucket(limits.requests_per_minute, MINUTE_NS)
        self.tokens = _bucket(limits.tokens_per_minute, MINUTE_NS)
        self._link = _bucket(limits.link_bytes_per_s, NS_PER_S)

    def over_at_once(self, num_sequences: int) -> Over | None:
        """The limit that so many more sequences would be over; None if they may come in."""
        allowed = self.limits.requests_in_flight
        if allowed is not None and self.num_in_flight + num_sequences > allowed:
            return Over(Limit.IN_FLIGHT, allowed, RETRY_IN_FLIGHT_NS)
        return None

    def over(self, now_ns: int) -> Over | None:
        """The limit that keeps a request out now; None if it may come in."""
        for limit, bucket in ((Limit.REQUESTS, self.requests), (Limit.TOKENS, self.tokens)):
            if bucket is not None and (wait_ns := bucket.wait_ns(now_ns)):
                return Over(limit, bucket.units, wait_ns)
        return self.over_at_once(1)

    def enter(self, now_ns: int) -> None:
        """A request was admitted, with one sequence."""
        self.num_in_flight += 1
        if self.requests is not None:
            self.requests.take(1, now_ns)

    def widen(self, num_sequences: int) -> None:
        """A request that was admitted has so many sequences more."""
        self.num_in_flight += num_sequences

    def leave(self, num_sequences: int = 1) -> None:
        """A request that was admitted has ended, with all its sequences."""
        self.num_in_flight -= num_sequences

    def validate(self) -> None:
        """Check what has to hold between two calls (`hold`)."""
        buckets = (self.requests, self.tokens, self._link)
        hold(
            as_many_leave_as_enter=self.num_in_flight >= 0,
            no_bucket_is_more_than_full=all(each is None or each.is_sound for each in buckets),
        )

    def count_tokens(self, num_tokens: int, now_ns: int) -> None:
        """Charge tokens, or refund them if negative."""
        if self.tokens is not None:
            self.tokens.take(num_tokens, now_ns)

    def may_ship(self, now_ns: int) -> bool:
        """Return True if anything is left of the links' share."""
        return self._link is None or self._link.wait_ns(now_ns) == 0

    def ship(self, num_bytes: int, now_ns: int) -> None:
        """Charge bytes of a link."""
        if self._link is not None:
            self._link.take(num_bytes, now_ns)


def _bucket(units: int | None, period_ns: int) -> TokenBucket | None:
    return None if units is None else TokenBucket(units, period_ns)


TOKENS_MIN = 8
"""Minimum tokens of a sequence: shorter answers do not measure an engine's speed."""
GROWTH_MAX = 2
FADING = 0.02
"""Weight of a new answer that is slower than those before."""


class OutputRate:
    """Rate of tokens of one sequence: that of the fastest recent answers.

    One answer at most doubles it: tokens that were held up in transit come all at once.
    """

    def __init__(self) -> None:
        self._per_s: float | None = None

    def observe(self, num_tokens: int, num_sequences: int, duration_ns: int) -> None:
        """Count an answer that has ended.

        Args:
            num_sequences: At least 1.
            duration_ns: From the first token, or from when an engine was asked for it.
        """
        each = num_tokens / num_sequences
        if each < TOKENS_MIN or duration_ns <= 0:
            return
        per_s = each * NS_PER_S / duration_ns
        if self._per_s is None:
            self._per_s = per_s
        elif per_s > self._per_s:
            self._per_s = min(per_s, GROWTH_MAX * self._per_s)
        else:
            self._per_s += FADING * (per_s - self._per_s)

    def most(self, num_sequences: int, duration_ns: int) -> int | None:
        """Tokens that so many sequences have had made in a time, at most; returns none while no
        speed is known.

        Args:
            num_sequences: At least 1.
            duration_ns: Time since an engine was asked for them.
        """
        if self._per_s is None:
            return None
        return num_sequences * ceil(self._per_s * duration_ns / NS_PER_S)

    def since(self, num_sequences: int, duration_ns: int) -> int:
        """Tokens that were made and not seen in a time; 0 while no speed is known."""
        if self._per_s is None:
            return 0
        return num_sequences * int(self._per_s * duration_ns / NS_PER_S)


TRIES_MAX = 10
WINDOW_NS = 60 * NS_PER_S
ADDRESSES_MAX = 1024
"""Addresses that are remembered; beyond it the oldest is forgotten."""


class WrongKeys:
    """Counts wrong keys by address."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def wrong(self, address: str, now_ns: int) -> int:
        """Count a wrong key.

        Returns:
            Seconds after which another try is answered; 0 if this one is.
        """
        since_ns, count = self._counts.pop(address, (now_ns, 0))
        if now_ns - since_ns >= WINDOW_NS:
            since_ns, count = now_ns, 0
        while len(self._counts) >= ADDRESSES_MAX:
            del self._counts[next(iter(self._counts))]
        self._counts[address] = since_ns, count + 1
        if count < TRIES_MAX:
            return 0
        return max(1, -(-(since_ns + WINDOW_NS - now_ns) // NS_PER_S))
