"""Usage: what a tenant used of engines, links and pools. All amounts are integers.

Sums of integers do not depend on the order or the grouping of what is added, so a bill, the
counters of a process and the records in its log can be compared for equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from prfaas.core.audit.records import RecordKind


class UsagePhase(StrEnum):
    """Part of the service of a request."""

    PREFILL_LOCAL = "prefill_local"
    """Prefill in the PD cluster."""
    PREFILL_REMOTE = "prefill_remote"
    """Prefill in a PrfaaS cluster."""
    TRANSFER = "transfer"
    """KV blocks over a link."""
    STORAGE = "storage"
    """KV blocks in memory and on the disk of pool nodes."""
    DECODE = "decode"


class UsageKey(NamedTuple):
    """Attribution of usage; each part is empty if unknown."""

    tenant: str
    """Name of the tenant, or its tag in records of pool nodes."""
    phase: str
    """One of `UsagePhase`."""
    cluster: str
    """Cluster that served: of the engine, of the pool node, or at the remote end of the link."""
    service: str


@dataclass(slots=True)
class Amounts:
    """Amounts of usage."""

    count: int = 0
    """Prefills, decodes, or records of transfers at the sending end."""
    tokens: int = 0
    """Prompt tokens to compute, or output tokens."""
    engine_ns: int = 0
    """Work of an instance for prefills, ns."""
    slot_ns: int = 0
    """Time of a sequence in an instance that decodes, ns."""
    sent_bytes: int = 0
    """Bytes of blocks at the sending end of links; repeated fragments count again."""
    sent_wire_bytes: int = 0
    """The same as transmitted: coded fragments with their coded size."""
    received_bytes: int = 0
    """Bytes of blocks at the receiving end."""
    received_wire_bytes: int = 0
    byte_ns: int = 0
    """Bytes of blocks held, times ns."""

    def add(self, other: Amounts) -> None:
        """Add amounts."""
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def nonzero(self) -> dict[str, int]:
        """Amounts above 0 by name."""
        return {name: value for name, value in zip(NAMES, astuple(self), strict=True) if value}


NAMES = tuple(each.name for each in fields(Amounts))


class Meter:
    """Usage since the last record of it."""

    def __init__(self) -> None:
        self._open: dict[UsageKey, Amounts] = {}

    def add(self, key: UsageKey, amounts: Amounts) -> None:
        """Count usage."""
        found = self._open.get(key)
        if found is None:
            self._open[key] = amounts
        else:
            found.add(amounts)

    def take(self) -> dict[UsageKey, Amounts]:
        """Usage since the last call."""
        taken, self._open = self._open, {}
        return taken


def usage_record(key: UsageKey, amounts: Amounts, **more: object) -> dict[str, object]:
    """Record of usage for an audit log."""
    return {
        "kind": RecordKind.USAGE,
        "phase": str(key.phase),
        "tenant": key.tenant,
        "cluster": key.cluster,
        "class": key.service,
        **more,
        **amounts.nonzero(),
    }


def amounts_of(record: Mapping[str, object], names: Iterable[str] = NAMES) -> Amounts:
    """Amounts of a record; a value that is no count is 0."""
    return Amounts(**{name: count_of(record.get(name)) for name in names})


def count_of(value: object) -> int:
    """A count in a record; 0 if it is none."""
    return value if type(value) is int and value >= 0 else 0
