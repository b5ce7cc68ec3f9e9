"""Eviction from a full tier: one interface, and least recently used.

Maximum ages of blocks, by tenant, and the coding of an age on links.

The age of a block counts from the time at which an engine computed it. Copies, and blocks that were
written to a lower tier, keep that time. It is known to GRAIN_S, rounded so that a block is never
taken for younger than it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from prfaas.core.invariants import require

GRAIN_S = 10
"""Resolution of the times at which blocks were computed, seconds."""
UNKNOWN_S = 0
"""Time of a block of which it is not known: such a block is older than any limit."""
NOT_READ_S = 1 << 40
"""Time of a block that has to be read before it is known."""
_MANTISSA_BITS, _EXPONENT_MAX = 10, 20
AGE_UNKNOWN = (_EXPONENT_MAX + 1) << _MANTISSA_BITS
"""Code of an unknown age. Codes have 15 bits."""


class MaxAges:
    """Limits of several gateways: the strictest counts.

    Args:
        announced: Limits of each gateway in seconds, by the tags of tenants; that of the empty tag
            is for all other blocks.
    """

    def __init__(self, announced: Iterable[Mapping[str, int]] = ()) -> None:
        self._limits: dict[str, int] = {}
        others: list[int] = []
        for limits in announced:
            others += [limits[""]] if "" in limits else []
            for tag, limit_s in limits.items():
                self._limits[tag] = min(limit_s, self._limits.get(tag, limit_s))
        self._others = min(others, default=None)

    def __bool__(self) -> bool:
        return bool(self._limits)

    @property
    def tags(self) -> frozenset[str]:
        """Tags with a limit of their own."""
        return frozenset(self._limits) - {""}

    def limit_s(self, tag: str) -> int | None:
        """Return the limit of a tenant's blocks, seconds; None without one."""
        return self._limits.get(tag, self._others)

    def is_over(self, tag: str, born_s: int, now_s: float) -> bool:
        """Return True if a block is neither served nor kept.

        Args:
            tag: Tag of its tenant; empty if unknown.
            born_s: Unix time at which it was computed, seconds, or UNKNOWN_S.
        """
        limit_s = self.limit_s(tag)
        return limit_s is not None and now_s - born_s >= limit_s


def born_at(now_s: float, age_s: int = 0) -> int:
    """Return the time at which a block of an age was computed, at most GRAIN_S too early."""
    return max(UNKNOWN_S, int(now_s - age_s) // GRAIN_S * GRAIN_S)


def age_code(born_s: int, now_s: float) -> int:
    """Return the code of an age: ten bits and an exponent, rounded up by 0.2 % at most."""
    if born_s == UNKNOWN_S:
        return AGE_UNKNOWN
    age_s = max(0, int(now_s) - born_s)
    exponent = max(0, age_s.bit_length() - _MANTISSA_BITS)
    mantissa = -(-age_s // (1 << exponent))
    if mantissa >> _MANTISSA_BITS:
        mantissa, exponent = mantissa >> 1, exponent + 1
    if exponent > _EXPONENT_MAX:
        return AGE_UNKNOWN
    return exponent << _MANTISSA_BITS | mantissa


def is_age_code(code: int) -> bool:
    """Return True if `age_code` may return a code: every age has one."""
    mantissa, exponent = code & ((1 << _MANTISSA_BITS) - 1), code >> _MANTISSA_BITS
    is_short = exponent > 0 and not mantissa >> (_MANTISSA_BITS - 1)
    return code == AGE_UNKNOWN or (exponent <= _EXPONENT_MAX and not is_short)


def born_in(code: int, now_s: float) -> int:
    """Return the time at which a block was computed that has just arrived with a code."""
    if code == AGE_UNKNOWN:
        return UNKNOWN_S
    mantissa, exponent = code & ((1 << _MANTISSA_BITS) - 1), code >> _MANTISSA_BITS
    return born_at(now_s, mantissa << exponent)


K = TypeVar("K", bound=Hashable)


class EvictionPolicy(Protocol[K]):
    """Keeps an order of a tier's blocks. Receives every event of them."""

    def added(self, key: K) -> None:
        """It came; it was not there."""

    def used(self, key: K) -> None:
        """It served a hit."""

    def removed(self, key: K) -> None:
        """It is gone."""

    def order(self) -> Iterator[K]:
        """All there is, what should go first at the front. Valid until the next change."""
        ...


class LeasedLast(EvictionPolicy[K]):
    """Leased blocks are evicted last and copies first, the others in another policy's order.

    A lease ends when its key is used, released, or its time is over. It is no pin: when all that is
    left is leased, that goes, too. A copy is a block that was fetched from another host of the
    site, which still has it.

    Args:
        rest: Orders what is neither leased nor a copy.
    """

    def __init__(self, rest: EvictionPolicy[K]) -> None:
        self._rest = rest
        self._copies = LeastRecentlyUsed[K]()
        self._are_copies: set[K] = set()
        """Copies, leased ones included."""
        self._leases: OrderedDict[K, tuple[int, int]] = OrderedDict()
        """End and bytes of each lease, in order of creation."""
        self.num_bytes = 0
        """Bytes of leased blocks."""
        self.copy_bytes = 0
        """Bytes of leased copies: what is evicted first once its lease ends."""

    def __len__(self) -> int:
        return len(self._leases)

    def added(self, key: K) -> None:
        """It is neither leased nor a copy."""
        self._rest.added(key)

    def used(self, key: K) -> None:
        """End a lease after its load."""
        if self._end(key):
            self._unleased(key).added(key)
        else:
            self._unleased(key).used(key)

    def removed(self, key: K) -> None:
        """Forget it."""
        if not self._end(key):
            self._unleased(key).removed(key)
        self._are_copies.discard(key)

    def order(self) -> Iterator[K]:
        """First what no request waits for."""
        yield from self.unleased()
        yield from self.leased()

    def unleased(self) -> Iterator[K]:
        """Blocks without lease, in order of eviction."""
        yield from self._copies.order()
        yield from self._rest.order()

    def leased(self) -> Iterator[K]:
        """Leased blocks, in order of eviction."""
        return iter(self._leases)

    def lease_of(self, key: K) -> tuple[int, int] | None:
        """End and bytes of the lease of a block; None if it is not leased."""
        return self._leases.get(key)

    def copies(self) -> Iterator[K]:
        """Copies without lease, in order of eviction."""
        return self._copies.order()

    def is_copy(self, key: K) -> bool:
        """Return True if a block is a copy."""
        return key in self._are_copies

    def lease(self, key: K, until_ns: int, num_bytes: int, *, is_copy: bool = False) -> None:
        """Lease a block of this size; a copy remains one."""
        if key not in self._leases:
            self._unleased(key).removed(key)
            self.num_bytes += num_bytes
            self.copy_bytes += num_bytes * (key in self._are_copies)
        known_until_ns, num_bytes = self._leases.get(key, (0, num_bytes))
        if is_copy and key not in self._are_copies:
            self._are_copies.add(key)
            self.copy_bytes += num_bytes
        self._leases[key] = max(until_ns, known_until_ns), num_bytes

    def release(self, key: K) -> None:
        """End a lease; no effect if it is not leased."""
        if self._end(key):
            self._unleased(key).added(key)

    def expire(self, now_ns: int) -> None:
        """End the leases whose time is over."""
        for key in [key for key, (until_ns, _) in self._leases.items() if until_ns <= now_ns]:
            self.release(key)

    def validate(self) -> None:
        """Check that each block is in one order, and the sums; AssertionError if one does not
        hold."""
        keys = [*self.order()]
        sizes = {key: num_bytes for key, (_, num_bytes) in self._leases.items()}
        require(len(keys) == len(set(keys)), "a block in two orders of eviction")
        require(
            self._are_copies == {*self._copies.order(), *self._are_copies & sizes.keys()}, "copies"
        )
        require(self.num_bytes == sum(sizes.values()), "leased bytes")
        require(
            self.copy_bytes == sum(sizes[key] for key in self._are_copies & sizes.keys()),
            "bytes of copies",
        )

    def _unleased(self, key: K) -> EvictionPolicy[K]:
        """The order that a block without lease is in."""
        return self._copies if key in self._are_copies else self._rest

    def _end(self, key: K) -> bool:
        """End a lease, if there is one."""
        _, num_bytes = self._leases.pop(key, (0, None))
        self.num_bytes -= num_bytes or 0
        self.copy_bytes -= (num_bytes or 0) * (key in self._are_copies)
        return num_bytes is not None


class LeastRecentlyUsed(EvictionPolicy[K]):
    """The least recently used block is evicted first."""

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()

    def added(self, key: K) -> None:
        """It counts as used now."""
        self._keys[key] = None

    def used(self, key: K) -> None:
        """It goes last from now on."""
        self._keys.move_to_end(key)

    def removed(self, key: K) -> None:
        """Forget it."""
        del self._keys[key]

    def order(self) -> Iterator[K]:
        """Blocks from the least to the most recently used."""
        return iter(self._keys)
