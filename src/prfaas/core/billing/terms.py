"""Terms of clusters: prices and sizes, as gateways record them whenever they change.

Prices are decimal texts in records and fractions in sums, so that costs are exact: they are rounded
only where they are shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from prfaas.core.audit.records import RecordKind
from prfaas.core.billing.usage import Amounts, UsagePhase, count_of
from prfaas.core.market.choice import NS_PER_H
from prfaas.units import BYTES_PER_TB, NS_PER_S

PD = "pd"
"""Role of the cluster that decodes."""
BYTES_PER_GB = 10**9
_BYTES_PER_TB = int(BYTES_PER_TB)
_DECIMAL_MAX = 40
"""Characters of a price in a record; longer ones are none."""


@dataclass(frozen=True, slots=True)
class ClusterTerms:
    """Terms of a cluster at one time."""

    cluster: str
    role: str
    pools: tuple[str, ...] = ()
    """Pool nodes of its engines."""
    gpus: int = 1
    slots: int = 1
    """Sequences that an instance decodes at a time."""
    gpu_hour: Fraction | None = None
    """Price of one GPU for one hour; None is not priced."""
    per_tb: Fraction | None = None
    """Price of 10**12 bytes on its link; None is not priced."""
    gb_hour: Fraction | None = None
    """Price of 10**9 bytes in its pool nodes for one hour; None is not priced."""
    watts: Fraction | None = None
    """Power of an instance while it works; None is unknown."""

    def cost(self, phase: str, amounts: Amounts) -> Fraction | None:
        """Cost of usage; None if a price of it is not known."""
        if phase == UsagePhase.TRANSFER:
            return _times(self.per_tb, amounts.sent_wire_bytes, _BYTES_PER_TB)
        if phase == UsagePhase.STORAGE:
            return _times(self.gb_hour, amounts.byte_ns, BYTES_PER_GB * NS_PER_H)
        return _times(self.gpu_hour, self.gpus * self._instance(amounts), NS_PER_H)

    def joules(self, amounts: Amounts) -> Fraction | None:
        """Estimate of the energy of engines; None if their power is not known."""
        return _times(self.watts, self._instance(amounts), NS_PER_S)

    def _instance(self, amounts: Amounts) -> Fraction:
        """Time of a whole instance, ns."""
        return amounts.engine_ns + Fraction(amounts.slot_ns, self.slots)


def _times(price: Fraction | None, amount: Fraction | int, unit: int) -> Fraction | None:
    if not amount:
        return Fraction(0)
    return None if price is None else price * amount / unit


def terms_record(terms: ClusterTerms) -> dict[str, object]:
    """Record of terms for an audit log."""
    return {
        "kind": RecordKind.TERMS,
        "cluster": terms.cluster,
        "role": terms.role,
        "pools": ",".join(terms.pools),
        "gpus": terms.gpus,
        "slots": terms.slots,
        **{name: _text(getattr(terms, name)) for name in _PRICES},
    }


def terms_of(record: Mapping[str, object]) -> ClusterTerms:
    """Terms of a record; what is no price is None."""
    return ClusterTerms(
        str(record.get("cluster", "")),
        str(record.get("role", "")),
        tuple(filter(None, str(record.get("pools", "")).split(","))),
        max(1, count_of(record.get("gpus"))),
        max(1, count_of(record.get("slots"))),
        *(_price(record.get(name)) for name in _PRICES),
    )


_PRICES = ("gpu_hour", "per_tb", "gb_hour", "watts")


def exact(price: float) -> Fraction:
    """The decimal number that a price was written as."""
    return Fraction(repr(price))


def _text(price: Fraction | None) -> str:
    """A decimal text; prices are made from decimals, so it is exact."""
    return "" if price is None else repr(float(price))


def _price(text: object) -> Fraction | None:
    if not isinstance(text, str) or not text or len(text) > _DECIMAL_MAX:
        return None
    try:
        found = exact(float(text))
    except (ValueError, OverflowError):
        return None
    return found if found >= 0 else None


class _Dated(NamedTuple):
    at: str
    number: int
    terms: ClusterTerms


@dataclass(slots=True)
class TermsBook:
    """Terms by gateway, cluster and time."""

    _dated: dict[tuple[str, str], list[_Dated]] = field(default_factory=dict)
    _cluster_of: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Role and name of the cluster of each pool."""
    _gateway_of: dict[str, str] = field(default_factory=dict)
    """A gateway that has terms of the cluster."""

    def add(self, gateway: str, at: str, number: int, terms: ClusterTerms) -> None:
        """Terms from a line of a gateway's log on; the lines of a log come in their order."""
        self._dated.setdefault((gateway, terms.cluster), []).append(_Dated(at, number, terms))
        self._gateway_of.setdefault(terms.cluster, gateway)
        for pool in terms.pools:
            self._cluster_of[pool] = terms.role, terms.cluster

    def cluster_of(self, *pools: str) -> str:
        """The PrfaaS cluster of some pools, else their PD cluster; empty if unknown."""
        found = [self._cluster_of[pool] for pool in pools if pool in self._cluster_of]
        remote = [name for role, name in found if role != PD]
        return next(iter(remote or [name for _, name in found]), "")

    def at_line(self, gateway: str, cluster: str, number: int) -> ClusterTerms | None:
        """Terms at a line of the gateway's own log; None if unknown."""
        dated = self._dated.get((gateway, cluster), ())
        place = bisect_right(dated, number, key=lambda each: each.number)
        return dated[place - 1].terms if place else None

    def at_time(self, gateway: str, cluster: str, at: str) -> ClusterTerms | None:
        """Terms at a time; None if unknown.

        Args:
            gateway: Signed the ticket; empty for usage that no gateway asked for.
            at: Time, as in the lines.
        """
        dated = self._dated.get((gateway or self._gateway_of.get(cluster, ""), cluster), ())
        place = bisect_right(dated, at, key=lambda each: each.at)
        return dated[place - 1].terms if place else None
