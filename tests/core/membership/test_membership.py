"""Members join, drain and leave: nobody with work is dropped, and history does not matter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.membership.machine import Action, Join, Leave, MemberRow, Membership, Withhold
from prfaas.core.membership.members import (
    Listed,
    Member,
    MemberKind,
    RefusalCause,
    RefusedEntry,
    Site,
    State,
)

SITE = Site({"pd": ("both",), "prfaas": ("both",)}, "tiny")
POOL = Member("pool", MemberKind.POOL, "pd", "10.0.0.1:7100")


def engine(number: int, place: int | None = None, pool: str = "pool") -> Listed:
    at = number if place is None else place
    return Listed(
        Member(
            f"e{number}", MemberKind.ENGINE, "pd", f"http://10.0.1.{at}:8100", pool, "both", "tiny"
        )
    )


class Gateway:
    """A model of the gateway: what it is connected to, withholds, and runs."""

    def __init__(self, site: Site = SITE) -> None:
        self.machine = Membership(site)
        self.members: dict[str, Member] = {}
        self.withheld: set[str] = set()
        self.legs: dict[str, int] = {}
        self.now_ns = 0

    def lists(self, *entries: Listed, source: str = "file") -> list[Action]:
        self.now_ns += 1
        return self._apply(self.machine.listed(source, [Listed(POOL), *entries], self.now_ns))

    def well(self, name: str, *, is_well: bool = True) -> None:
        self._apply(self.machine.well(name, self.now_ns, is_well=is_well))

    def drain(self) -> None:
        self._apply(self.machine.drained(self._is_idle, self.now_ns))

    def state(self, name: str) -> State:
        return self.row(name).state

    def row(self, name: str) -> MemberRow:
        return next(row for row in self.machine.rows() if row.name == name)

    def takes(self, name: str) -> bool:
        return self.machine.state_of(name) is State.READY and name not in self.withheld

    def _is_idle(self, member: Member) -> bool:
        return not self.legs.get(member.name)

    def _apply(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case Join(member):
                    assert member.name not in self.members
                    assert member.address not in {m.address for m in self.members.values()}
                    if member.kind is MemberKind.ENGINE:
                        assert member.pool in self.members
                    self.members[member.name] = member
                case Withhold(name, withheld):
                    assert name in self.members
                    (self.withheld.add if withheld else self.withheld.discard)(name)
                case Leave(member):
                    assert not self.legs.get(member.name), "dropped with legs in flight"
                    assert self.members.pop(member.name) == member
                    self.withheld.discard(member.name)
        return actions


def test_an_engine_gets_work_once_it_is_listed_and_well() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    assert gateway.state("e1") is State.SEEN
    gateway.well("e1")
    assert gateway.takes("e1")


def test_an_engine_that_is_not_ready_gets_nothing_and_keeps_what_it_has() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    gateway.legs["e1"] = 1
    gateway.lists(Listed(engine(1).member, is_ready=False))
    gateway.drain()
    assert not gateway.takes("e1")
    assert "e1" in gateway.members
    gateway.lists(engine(1))
    assert gateway.takes("e1")


def test_an_engine_that_leaves_drains_first() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    gateway.legs["e1"] = 1
    gateway.lists()
    assert (gateway.state("e1"), gateway.takes("e1")) == (State.DRAINING, False)
    gateway.drain()
    assert "e1" in gateway.members
    gateway.legs["e1"] = 0
    gateway.drain()
    assert gateway.state("e1") is State.GONE


def test_another_address_is_a_leave_and_a_join() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    gateway.legs["e1"] = 1
    gateway.lists(engine(1, place=9))
    assert {row.state for row in gateway.machine.rows() if row.name == "e1"} == {
        State.DRAINING,
        State.SEEN,
    }
    gateway.drain()
    gateway.legs["e1"] = 0
    gateway.drain()
    assert gateway.members["e1"].address.endswith("9:8100")
    assert not gateway.takes("e1"), "the successor has not answered yet"


def test_an_address_is_free_once_its_holder_has_drained() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.legs["e1"] = 1
    gateway.lists(engine(2, place=1))
    assert gateway.state("e2") is State.SEEN
    assert "e2" not in gateway.members
    gateway.legs["e1"] = 0
    gateway.drain()
    assert set(gateway.members) == {"pool", "e2"}


def test_a_pool_node_that_moves_takes_no_engine_along() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    moved = Member("pool", MemberKind.POOL, "pd", "10.0.0.2:7100")
    gateway._apply(gateway.machine.listed("file", [Listed(moved), engine(1)], 5))
    assert gateway.takes("e1")
    assert "pool" in gateway.withheld
    gateway.drain()
    assert gateway.members["pool"] == moved
    assert gateway.takes("e1")


def test_a_pool_node_leaves_after_its_engines() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    gateway.legs["e1"] = 1
    gateway._apply(gateway.machine.listed("file", [], 5))
    gateway.drain()
    assert set(gateway.members) == {"pool", "e1"}
    gateway.legs["e1"] = 0
    gateway.drain()
    assert not gateway.members


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "e2", "model": "other"}, RefusalCause.OTHER_MODEL),
        ({"name": "e2", "cluster": "nowhere"}, RefusalCause.UNKNOWN_CLUSTER),
        ({"name": "e2", "role": "boss"}, RefusalCause.UNKNOWN_ROLE),
        ({"name": "e2", "pool": "nowhere"}, RefusalCause.UNKNOWN_POOL),
        ({"name": "e2", "pool": "e1"}, RefusalCause.UNKNOWN_POOL),
        ({"name": "e2", "cluster": "prfaas"}, RefusalCause.UNKNOWN_POOL),
        ({"name": "e2", "address": "http://10.0.1.1:8100"}, RefusalCause.ADDRESS_TAKEN),
        ({"name": "e1", "address": "http://10.0.1.2:8100"}, RefusalCause.DUPLICATE_NAME),
    ],
)
def test_a_member_that_contradicts_is_refused_and_harms_nobody(
    change: dict[str, str], reason: RefusalCause
) -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    fields = {name: getattr(engine(1).member, name) for name in Member.__slots__}
    fields |= {"address": "http://10.0.1.2:8100", **change}
    # The odd one is listed first, and still does not replace the incumbent.
    odd = Listed(Member(**fields))
    gateway.lists(odd, engine(1))
    (row,) = [row for row in gateway.machine.rows() if row.state is State.REFUSED]
    assert row.refusal is not None
    assert (row.name, row.refusal.reason) == (change["name"], reason)
    assert gateway.takes("e1")
    gateway.lists(engine(1))
    assert all(row.state is not State.REFUSED for row in gateway.machine.rows())


def test_more_members_than_the_limit_are_refused() -> None:
    gateway = Gateway(
        Site(
            SITE.clusters, "tiny", {MemberKind.POOL: 1, MemberKind.ENGINE: 2, MemberKind.GATEWAY: 0}
        )
    )
    gateway.lists(engine(2), engine(3))
    gateway.lists(engine(1), engine(2), engine(3))
    assert set(gateway.members) == {"pool", "e2", "e3"}
    refusal = gateway.row("e1").refusal
    assert refusal is not None
    assert refusal.reason is RefusalCause.TOO_MANY


def test_a_member_that_reports_another_model_gets_nothing_until_it_agrees() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway.well("e1")
    refusal = RefusedEntry("e1", RefusalCause.OTHER_MODEL, "it serves 'big'")
    gateway._apply(gateway.machine.contradicts(refusal, 7))
    assert (gateway.state("e1"), gateway.takes("e1")) == (State.REFUSED, False)
    gateway._apply(gateway.machine.agrees("e1", 8, RefusalCause.OTHER_LAYOUT))
    assert gateway.state("e1") is State.REFUSED
    gateway._apply(gateway.machine.agrees("e1", 9, RefusalCause.OTHER_MODEL))
    assert gateway.takes("e1")


def test_two_sources_add_up_and_one_name_is_not_given_twice() -> None:
    gateway = Gateway()
    gateway.lists(engine(1))
    gateway._apply(gateway.machine.listed("folder", [engine(2), engine(1, place=7)], 4))
    assert set(gateway.members) == {"pool", "e1", "e2"}
    assert gateway.members["e1"].address.endswith(".1:8100")
    gateway._apply(gateway.machine.listed("folder", [], 5))
    gateway.drain()
    assert set(gateway.members) == {"pool", "e1"}


ENGINES = st.integers(1, 5)
PLACES = st.integers(1, 8)
EVENTS = st.one_of(
    st.tuples(st.just("list"), st.dictionaries(ENGINES, PLACES, max_size=5), st.booleans()),
    st.tuples(st.just("well"), ENGINES, st.booleans()),
    st.tuples(st.just("not_ready"), ENGINES, st.booleans()),
    st.tuples(st.just("begin"), ENGINES, st.booleans()),
    st.tuples(st.just("end"), ENGINES, st.booleans()),
    st.tuples(st.just("drain"), ENGINES, st.booleans()),
)


def distinct(wanted: dict[int, int]) -> dict[int, int]:
    """The list without two engines at one address."""
    return {number: at for at, number in {at: number for number, at in wanted.items()}.items()}


@given(st.lists(EVENTS, max_size=40))
def test_any_history_ends_as_a_fresh_list_would(events: list[tuple[str, object, bool]]) -> None:
    gateway, wanted, not_ready = Gateway(), dict[int, int](), set[int]()

    def relist(to: Gateway) -> None:
        to.lists(
            *(
                Listed(engine(number, at).member, is_ready=number not in not_ready)
                for number, at in wanted.items()
            )
        )

    for kind, what, flag in events:
        if kind == "list":
            assert isinstance(what, dict)
            wanted = distinct(what)
            relist(gateway)
            continue
        assert isinstance(what, int)
        name = f"e{what}"
        if kind == "well":
            gateway.well(name, is_well=flag)
        elif kind == "not_ready":
            (not_ready.add if flag else not_ready.discard)(what)
            relist(gateway)
        elif kind == "begin" and gateway.takes(name):
            gateway.legs[name] = gateway.legs.get(name, 0) + 1
        elif kind == "end" and gateway.legs.get(name):
            gateway.legs[name] -= 1
        else:
            gateway.drain()
        for number in not_ready:
            assert not gateway.takes(f"e{number}") or number not in wanted
    fresh = Gateway()
    relist(fresh)
    # All work ends; a chain of successors may need several rounds.
    gateway.legs.clear()
    relist(gateway)
    while gateway.machine.is_draining:
        gateway.drain()
    for number in wanted:
        for each in (gateway, fresh):
            each.well(f"e{number}")
    assert gateway.members == fresh.members
    assert gateway.withheld == fresh.withheld
    for name in fresh.members:
        assert gateway.machine.state_of(name) is fresh.machine.state_of(name)


def test_members_that_left_are_shown_up_to_a_limit() -> None:
    gateway = Gateway()
    for number in range(1, 200):
        gateway.lists(engine(number))
        gateway.drain()
    assert sum(row.state is State.GONE for row in gateway.machine.rows()) == 64


class Whole(Membership):
    """A machine that compares everybody at every change."""

    def _changes(self, *_: object) -> None:
        return None


@given(st.lists(EVENTS, max_size=40))
def test_a_change_of_some_engines_has_the_effects_of_the_whole_list(
    events: list[tuple[str, object, bool]],
) -> None:
    """Contradicting entries, pool nodes and shared addresses included."""
    machines = Membership(SITE), Whole(SITE)
    wanted, not_ready, busy = dict[int, int](), set[int](), set[str]()

    def entries() -> list[Listed]:
        found = [
            Listed(engine(number, place).member, is_ready=number not in not_ready)
            for number, place in wanted.items()
        ]
        return found if wanted.get(1) == 8 else [Listed(POOL), *found]

    def act(machine: Membership, kind: str, what: object, flag: bool) -> list[str]:
        if kind in ("list", "not_ready"):
            actions = machine.listed("file", entries(), 1)
        elif kind == "well":
            actions = machine.well(f"e{what}", 1, is_well=flag)
        elif kind == "drain":
            actions = machine.drained(lambda member: member.name not in busy, 1)
        else:
            actions = []
        return sorted(map(repr, actions))

    for kind, what, flag in events:
        if kind == "list":
            assert isinstance(what, dict)
            wanted = what
        elif kind == "not_ready":
            assert isinstance(what, int)
            (not_ready.add if flag else not_ready.discard)(what)
        else:
            (busy.add if kind == "begin" else busy.discard)(f"e{what}")
        one, other = (act(machine, kind, what, flag) for machine in machines)
        assert one == other
        rows = [sorted(map(repr, machine.rows())) for machine in machines]
        assert rows[0] == rows[1]
        assert machines[0].refusals() == {
            row.name: row.refusal for row in machines[0].rows() if row.refusal is not None
        }


def calls_of(action: Callable[[], object]) -> int:
    """Python functions that an action calls."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def test_a_change_of_one_engine_costs_as_many_calls_in_a_larger_site() -> None:
    found = []
    for size in (50, 1000):
        gateway = Gateway()
        pool, entries = Listed(POOL), [engine(number) for number in range(2, size)]
        gateway.machine.listed("file", [pool, *entries], 1)
        more = [pool, *entries, engine(1)]
        fewer = [pool, *entries[1:], more[-1]]
        machine = gateway.machine
        steps = [
            partial(machine.listed, "file", more, 2),
            partial(machine.well, "e1", 3, is_well=True),
            partial(machine.listed, "file", fewer, 4),
            partial(machine.drained, lambda _: True, 5),
        ]
        found.append([calls_of(step) for step in steps])
        assert machine.state_of("e1") is State.READY
        assert machine.state_of("e2") is None
    assert found[0] == found[1]
    assert max(found[0]) < 50
