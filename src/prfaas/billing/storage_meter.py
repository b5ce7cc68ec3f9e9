"""Metering of storage in a pool node: bytes of each tenant, times the time that they were held.

Contents are read at each housekeeping of the node, about twice a second, and count until the next
one. Bytes that belong to no known tenant have an empty tag, so that the rows of a tier add up to
all bytes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import nlargest
from typing import Protocol

from prometheus_client import Counter

from prfaas.core.billing.usage import Amounts, UsageKey, UsagePhase, usage_record
from prfaas.units import NS_PER_S

RECORD_NS = 60 * NS_PER_S
TENANTS_MAX = 1000
"""Tenants of a tier that are recorded each; the smaller ones are recorded together, without a tag.
"""

Write = Callable[[Mapping[str, object]], None]


class MeteredTier(Protocol):
    """A storage tier of the node."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """Bytes by tag of the tenant."""


class StorageMeter:
    """Storage used in the tiers of a pool node.

    Args:
        write: Writes a record to the audit log.
    """

    def __init__(
        self, tiers: Mapping[str, MeteredTier], write: Write, counter: Counter, now_ns: int
    ) -> None:
        self._tiers, self._write, self._counter = tiers, write, counter
        self._read_at_ns = self._recorded_at_ns = now_ns
        self._held = {name: _held(tier) for name, tier in tiers.items()}
        self._sums: dict[tuple[str, str], int] = {}

    def read(self, now_ns: int) -> None:
        """Count what was held since the last call, and record it now and then."""
        passed_ns, self._read_at_ns = now_ns - self._read_at_ns, now_ns
        for name, held in self._held.items():
            for tag, num_bytes in held.items():
                self._sums[name, tag] = self._sums.get((name, tag), 0) + num_bytes * passed_ns
        self._held = {name: _held(tier) for name, tier in self._tiers.items()}
        if now_ns - self._recorded_at_ns >= RECORD_NS:
            self.record(now_ns)

    def close(self, now_ns: int) -> None:
        """Count and record what is left."""
        self.read(now_ns)
        self.record(now_ns)

    def record(self, now_ns: int) -> None:
        """Record what is counted."""
        self._recorded_at_ns, sums, self._sums = now_ns, self._sums, {}
        for name in self._tiers:
            rows = {tag: total for (tier, tag), total in sums.items() if tier == name and total}
            self._counter.labels(name).inc(sum(rows.values()) / NS_PER_S)
            for tag, total in _largest(rows).items():
                key = UsageKey(tag, UsagePhase.STORAGE, "", "")
                self._write(usage_record(key, Amounts(byte_ns=total), tier=name))


def _held(tier: MeteredTier) -> dict[str, int]:
    held = {tag: count for tag, count in tier.held_bytes.items() if tag and count > 0}
    rest = tier.used_bytes - sum(held.values())
    return held | {"": rest} if rest > 0 else held


def _largest(rows: dict[str, int]) -> dict[str, int]:
    if len(rows) <= TENANTS_MAX:
        return rows
    kept = {tag: rows[tag] for tag in nlargest(TENANTS_MAX, rows.keys() - {""}, rows.__getitem__)}
    return kept | {"": sum(rows.values()) - sum(kept.values())}
