"""The bill: records of usage, movements, tickets and terms in; rows of usage and cost out.

Bytes of a link are charged as the sending pool node transmitted them. A record of the receiving
node is the second witness of the same bytes: it is charged only if the log of the sender is not
among the logs of the bill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from prfaas.core.audit.records import RecordKind
from prfaas.core.billing.terms import ClusterTerms, TermsBook, terms_of
from prfaas.core.billing.usage import Amounts, UsageKey, UsagePhase, amounts_of, count_of

SENT = "sent"
_STORAGE = ("byte_ns",)
_SERVICE = ("count", "tokens", "engine_ns", "slot_ns")


class BillLine(NamedTuple):
    """A record of a log."""

    log: str
    """Name of the process."""
    number: int
    at: str
    """Time, as in the line."""
    fields: Mapping[str, object]

    @property
    def kind(self) -> str:
        """Kind of the record."""
        return self.text("kind")

    def text(self, name: str) -> str:
        """A field; empty if it is no text."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


@dataclass(slots=True)
class BillRow:
    """Usage of one key."""

    amounts: Amounts = field(default_factory=Amounts)
    cost: Fraction = Fraction(0)
    """Exact sum of the priced part, in the currency of the prices."""
    joules: Fraction = Fraction(0)
    """Exact sum of the part of known power."""
    num_unpriced: int = 0
    """Records with a part that has no price."""

    def add(self, other: BillRow) -> None:
        """Add another row."""
        self.amounts.add(other.amounts)
        self.cost += other.cost
        self.joules += other.joules
        self.num_unpriced += other.num_unpriced


@dataclass(slots=True)
class BillSources:
    """Facts that records are joined with, from all logs."""

    logs: frozenset[str]
    book: TermsBook = field(default_factory=TermsBook)
    services: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Tenant's name and class of service by the id of the transfer."""
    tenants: dict[str, str] = field(default_factory=dict)

    def learn(self, line: BillLine, tickets_since: str = "") -> None:
        """Take what other records are joined with.

        Args:
            line: A record; those of a log come in their order.
            tickets_since: Time before which no ticket is needed.
        """
        if line.kind == RecordKind.TERMS:
            self.book.add(line.log, line.at, line.number, terms_of(line.fields))
            return
        name, tag = line.text("tenant_name"), line.text("tenant")
        if name and tag:
            name = self.tenants.setdefault(tag, name)
        if line.kind == RecordKind.TICKET and line.at >= tickets_since:
            self.services[line.text("transfer")] = name, line.text("class")


class Bill:
    """Rows by tenant, phase, cluster and class of service."""

    def __init__(self, sources: BillSources) -> None:
        self._sources = sources
        self.rows: dict[UsageKey, BillRow] = {}
        self.num_lost = 0
        """Records that processes could not write."""

    def add(self, line: BillLine) -> None:
        """Add a record of the period; records of other kinds change nothing."""
        if line.kind == RecordKind.USAGE:
            self._used(line)
        elif line.kind == RecordKind.MOVEMENT:
            self._moved(line)
        elif line.kind == RecordKind.GAP:
            self.num_lost += count_of(line.fields.get("lost"))

    def _used(self, line: BillLine) -> None:
        sources, phase, cluster = self._sources, line.text("phase"), line.text("cluster")
        tag = line.text("tenant")
        name = sources.tenants.get(tag, tag)
        if phase == UsagePhase.STORAGE:
            cluster = sources.book.cluster_of(line.log)
            terms = sources.book.at_time("", cluster, line.at)
            amounts = amounts_of(line.fields, _STORAGE)
        else:
            terms = sources.book.at_line(line.log, cluster, line.number)
            amounts = amounts_of(line.fields, _SERVICE)
        self._charge(UsageKey(name, phase, cluster, line.text("class")), amounts, terms)

    def _moved(self, line: BillLine) -> None:
        sources, tag = self._sources, line.text("tenant")
        source, target = line.text("from"), line.text("to")
        name, service = sources.services.get(line.text("transfer"), ("", ""))
        cluster = sources.book.cluster_of(source, target)
        terms = sources.book.at_time(line.text("gateway"), cluster, line.at)
        link, wire = (count_of(line.fields.get(each)) for each in ("link_bytes", "wire_bytes"))
        is_sent = line.text("direction") == SENT
        if is_sent:
            amounts = Amounts(count=1, sent_bytes=link, sent_wire_bytes=wire)
        else:
            amounts = Amounts(received_bytes=link, received_wire_bytes=wire)
        key = UsageKey(name or sources.tenants.get(tag, tag), UsagePhase.TRANSFER, cluster, service)
        if is_sent or source in sources.logs:
            self._charge(key, amounts, terms)
        else:
            charged = Amounts(count=1, sent_bytes=link, sent_wire_bytes=wire)
            self._charge(key, amounts, terms, charged)

    def _charge(
        self,
        key: UsageKey,
        amounts: Amounts,
        terms: ClusterTerms | None,
        charged: Amounts | None = None,
    ) -> None:
        charged = charged or amounts
        cost = joules = Fraction(0)
        is_unpriced = terms is None
        if terms is not None:
            found = terms.cost(key.phase, charged)
            cost, is_unpriced = found or cost, found is None
            joules = terms.joules(charged) or joules
        row = self.rows.setdefault(key, BillRow())
        row.add(BillRow(amounts, cost, joules, int(is_unpriced)))

    def by(self, dimensions: Sequence[str]) -> list[tuple[tuple[str, ...], BillRow]]:
        """Rows summed by some of the dimensions, sorted.

        Args:
            dimensions: Names of fields of `UsageKey`.
        """
        sums: dict[tuple[str, ...], BillRow] = {}
        for key, row in self.rows.items():
            part = tuple(str(getattr(key, name)) for name in dimensions)
            sums.setdefault(part, BillRow()).add(row)
        return sorted(sums.items(), key=lambda item: item[0])

    def total(self) -> BillRow:
        """Sum of all rows."""
        found = self.by(())
        return found[0][1] if found else BillRow()
