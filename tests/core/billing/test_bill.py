"""The bill from records: exact sums, prices at their time, each byte charged once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.billing.bill import Bill, BillLine, BillSources
from prfaas.core.billing.terms import ClusterTerms, TermsBook, exact, terms_of, terms_record
from prfaas.core.billing.usage import NAMES, Amounts, Meter, UsageKey, UsagePhase, usage_record

HOUR_NS = 3600 * 10**9
PD = ClusterTerms(
    "pd", "pd", ("pd-pool",), 8, 4, exact(2.0), exact(0.0), exact(0.01), exact(4000.0)
)
EAST = ClusterTerms("east", "prfaas", ("east-pool",), 8, 1, exact(3.6), exact(2.5), exact(0.0))


def at(second: int) -> str:
    return f"2026-11-23T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.000000Z"


class Log:
    """Records of one process."""

    def __init__(self, name: str) -> None:
        self.name, self.lines = name, list[BillLine]()

    def write(self, second: int, fields: dict[str, Any]) -> None:
        number = len(self.lines) + 1
        self.lines.append(BillLine(self.name, number, at(second), fields))


def bill_of(*logs: Log, since: str = "", until: str = "~") -> Bill:
    sources = BillSources(frozenset(log.name for log in logs))
    for log in logs:
        for line in log.lines:
            sources.learn(line)
    bill = Bill(sources)
    for log in logs:
        for line in log.lines:
            if since <= line.at < until:
                bill.add(line)
    return bill


def gateway(*terms: ClusterTerms) -> Log:
    log = Log("gateway")
    for each in terms:
        log.write(0, terms_record(each))
    return log


def prefill(**amounts: int) -> dict[str, Any]:
    key = UsageKey("tag-a", UsagePhase.PREFILL_REMOTE, "east", "batch")
    return usage_record(key, Amounts(**amounts), tenant_name="alice")


def movement(direction: str, wire: int, **more: str) -> dict[str, Any]:
    return {
        "kind": "movement",
        "direction": direction,
        "transfer": "t1",
        "gateway": "gateway",
        "tenant": "tag-a",
        "from": "east-pool",
        "to": "pd-pool",
        "outcome": "committed",
        "link_bytes": 2 * wire,
        "wire_bytes": wire,
        **more,
    }


COUNTS = st.integers(0, 2**62)
KEYS = st.builds(
    UsageKey,
    st.sampled_from(["a", "b", ""]),
    st.sampled_from([UsagePhase.PREFILL_LOCAL, UsagePhase.PREFILL_REMOTE, UsagePhase.DECODE]),
    st.sampled_from(["pd", "east"]),
    st.sampled_from(["", "batch"]),
)
AMOUNTS = st.builds(Amounts, COUNTS, COUNTS, COUNTS, COUNTS)
PRICES = st.decimals(0, 1000, places=3).map(lambda price: exact(float(price)))


@given(
    st.lists(
        st.one_of(st.tuples(KEYS, AMOUNTS), st.none(), PRICES),
        max_size=40,
    ),
    st.integers(0, 41),
)
def test_sums_of_the_bill_are_the_counters_whatever_is_recorded_together(
    steps: list[Any], cut: int
) -> None:
    """None records what was counted; a price records it and changes the terms of `east`."""
    log, meter, counted = gateway(PD, EAST), Meter(), Amounts()
    cost, east = Fraction(0), EAST

    def record(second: int) -> None:
        for key, amounts in meter.take().items():
            log.write(second, usage_record(key, amounts))

    for second, step in enumerate([*steps, None], 1):
        if isinstance(step, tuple):
            key, amounts = step
            counted.add(amounts)
            there = PD if key.cluster == "pd" else east
            whole = amounts.engine_ns + Fraction(amounts.slot_ns, there.slots)
            cost += whole * 8 * (there.gpu_hour or 0) / HOUR_NS
            meter.add(key, Amounts(*(getattr(amounts, name) for name in NAMES)))
            continue
        record(second)
        if step is not None:
            east = terms_of(terms_record(EAST) | {"gpu_hour": repr(float(step))})
            log.write(second, terms_record(east))

    bill = bill_of(log)
    total = bill.total()
    assert total.amounts == counted
    assert total.cost == cost
    for dimensions in ((), ("tenant",), ("phase", "cluster"), ("service", "tenant", "phase")):
        rows = [row for _, row in bill.by(dimensions)]
        assert sum((row.cost for row in rows), Fraction(0)) == cost
    early, late = bill_of(log, until=at(cut)), bill_of(log, since=at(cut))
    assert early.total().cost + late.total().cost == cost


def test_a_price_holds_from_its_line_on() -> None:
    log = gateway(EAST)
    log.write(5, prefill(engine_ns=HOUR_NS))
    log.write(5, terms_record(terms_of(terms_record(EAST) | {"gpu_hour": "1.2"})))
    log.write(5, prefill(engine_ns=HOUR_NS))
    ((key, row),) = bill_of(log).by(["tenant", "phase", "cluster", "service"])
    assert key == ("alice", "prefill_remote", "east", "batch")
    assert row.cost == 8 * (Fraction("3.6") + Fraction("1.2"))


def test_a_transfer_is_charged_as_its_sender_transmitted_it() -> None:
    log, east, pd = gateway(PD, EAST), Log("east-pool"), Log("pd-pool")
    log.write(
        1,
        {
            "kind": "ticket",
            "transfer": "t1",
            "tenant": "tag-a",
            "tenant_name": "alice",
            "class": "batch",
        },
    )
    east.write(2, movement("sent", 10**12))
    east.write(3, movement("sent", 10**12, outcome="late"))
    pd.write(2, movement("received", 10**12))
    both = bill_of(log, east, pd)
    ((key, row),) = both.by(["tenant", "phase", "cluster", "service"])
    assert key == ("alice", "transfer", "east", "batch")
    assert row.amounts.sent_wire_bytes == 2 * 10**12
    assert row.amounts.received_wire_bytes == 10**12
    assert row.amounts.sent_bytes == 4 * 10**12
    assert row.cost == 2 * Fraction("2.5")
    # Without the sender's log, what arrived is charged.
    assert bill_of(log, pd).total().cost == Fraction("2.5")


def test_bytes_of_unknown_transfers_are_in_the_bill() -> None:
    log, east = gateway(PD, EAST), Log("east-pool")
    lost = movement("sent", 7, outcome="stopped", gateway="", tenant="", transfer="")
    east.write(2, lost)
    east.write(3, movement("sent", 5, gateway="elsewhere", transfer="t9"))
    bill = bill_of(log, east)
    assert [key for key, _ in bill.by(["tenant"])] == [("",), ("tag-a",)]
    assert bill.total().amounts.sent_wire_bytes == 12
    assert bill.total().num_unpriced == 1


def test_storage_costs_by_the_bytes_and_the_time_that_they_were_held() -> None:
    log, pd = gateway(PD, EAST), Log("pd-pool")
    log.write(1, prefill(count=1))
    key = UsageKey("tag-a", UsagePhase.STORAGE, "", "")
    pd.write(60, usage_record(key, Amounts(byte_ns=10**9 * HOUR_NS), tier="host"))
    rows = dict(bill_of(log, pd).by(["tenant", "phase", "cluster"]))
    assert rows["alice", "storage", "pd"].cost == Fraction("0.01")


def test_decode_is_charged_by_its_share_of_an_instance_with_energy() -> None:
    log = gateway(PD, EAST)
    key = UsageKey("a", UsagePhase.DECODE, "pd", "")
    log.write(1, usage_record(key, Amounts(1, 100, slot_ns=HOUR_NS)))
    total = bill_of(log).total()
    assert total.cost == 8 * 2 * Fraction(1, 4)
    assert total.joules == 4000 * 3600 * Fraction(1, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"count": -5, "tokens": "many", "engine_ns": True},
        {"tenant": 7, "cluster": ["east"], "class": None},
        {"wire_bytes": 10, "byte_ns": 10},
    ],
)
def test_a_strange_record_adds_nothing(fields: dict[str, Any]) -> None:
    log = gateway(PD, EAST)
    log.write(1, prefill() | fields)
    total = bill_of(log).total()
    assert total.amounts == Amounts()
    assert total.cost == 0


def test_lost_records_are_counted() -> None:
    log = gateway(PD)
    log.write(1, {"kind": "gap", "lost": 12})
    assert bill_of(log).num_lost == 12


@given(PRICES, PRICES)
def test_terms_survive_their_record(gpu_hour: Fraction, per_tb: Fraction) -> None:
    terms = ClusterTerms("east", "prfaas", ("a", "b"), 8, 3, gpu_hour, per_tb, None, None)
    assert terms_of(terms_record(terms)) == terms


def test_terms_before_their_first_line_are_unknown() -> None:
    book = TermsBook()
    book.add("gateway", at(10), 3, EAST)
    assert book.at_time("gateway", "east", at(9)) is None
    assert book.at_line("gateway", "east", 2) is None
    assert book.at_time("", "east", at(10)) == EAST
