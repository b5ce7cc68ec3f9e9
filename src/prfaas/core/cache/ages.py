"""Maximum ages of blocks, by tenant, and the coding of an age on links.

The age of a block counts from the time at which an engine computed it. Copies, and blocks that were
written to a lower tier, keep that time. It is known to GRAIN_S, rounded so that a block is never
taken for younger than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
