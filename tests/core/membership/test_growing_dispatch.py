"""Instances join and leave a dispatcher while it routes."""

from __future__ import annotations

import pytest

from prfaas.core.control.role_loop import Role
from prfaas.core.control.split import Split, decode_name
from prfaas.core.dispatch.stages import DecodeBook
from prfaas.core.dispatch.types import Arrival, ClusterMember, Routed
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.resilience.quarantine import Guards
from tests.core.dispatching import dispatcher


def arrival(number: int) -> Arrival:
    return Arrival(number, 50, 0, offloadable=False)


def test_an_instance_that_joins_gets_work_once_it_is_ready() -> None:
    made = dispatcher()
    names = ("h0", "h1")
    for name in names:
        made.set_ready(name, ready=False, now_ns=1)
    made.add("pd", ClusterMember("late", "late-pool"))
    made.describe("late", num_tokens_max=1000, layout_id=b"")
    made.set_ready("late", ready=True, now_ns=2)
    found = made.arrive(arrival(1), 3)
    assert isinstance(found, Routed)
    assert found.prefill == "late"
    with pytest.raises(ValueError, match="late has open requests"):
        made.remove("late", 4)
    made.requests.end(1, 5)
    made.remove("late", 6)
    for name in names:
        made.set_ready(name, ready=True, now_ns=7)
    again = made.arrive(arrival(2), 8)
    assert isinstance(again, Routed)
    assert again.prefill != "late"


def test_a_decode_book_forgets_who_has_left() -> None:
    book = DecodeBook([ClusterMember("a", "pool")])
    book.add(ClusterMember("b", "pool"))
    book.set_ready("b", ready=True)
    book.set_ready("a", ready=False)
    assert book.choose() == "b"
    book.leave("b")
    book.remove("b")
    assert book.choose() is None
    book.add(ClusterMember("b", "pool"))
    assert book.choose() is None, "a successor is not ready because its predecessor was"


def test_a_split_gives_the_place_of_one_that_left_to_another() -> None:
    split = Split(["a", "b"], [Role.PREFILL, Role.DECODE], None)
    for round_ in range(10):
        for name in ("a", "b"):
            split.remove(name)
        for name, role in (("b", Role.DECODE), ("a", Role.PREFILL)):
            split.add(name, role, round_)
            split.set_usable(name, usable=True)
    assert len(split.roles.all) == 2
    ready = {name for name, is_ready in split.ready() if is_ready}
    assert ready == {"a", decode_name("b")}


def test_the_index_gives_the_number_of_a_source_that_left_to_another() -> None:
    index, layout_id, keys = PrefixIndex(), b"L" * 32, [(0, b"k" * 32)]
    for number in range(100):
        name = f"pod-{number}"
        index.begin_snapshot(name)
        index.add(name, layout_id, keys)
        index.end_snapshot(name)
        assert index.num_blocks(name) == 1
        index.forget(name)
    assert index.num_blocks_known == 0
    assert len(index._by_number) == 1
    index.lose("pod-0")
    assert not index._sources, "a late loss brings nobody back"


def test_a_breaker_goes_with_its_target() -> None:
    class Gate:
        def set_broken(self, target: object, now_ns: int, *, broken: bool) -> None: ...

        def takes(self, name: str) -> bool:
            return True

    guards = Guards(["a"], Gate(), lambda *_: None, [["a"]])
    guards.add("b", 0)
    guards.add(("x", "y"))
    assert set(guards.breakers) == {"a", "b", ("x", "y")}
    guards.remove("b")
    guards.remove(("x", "y"))
    assert set(guards.breakers) == {"a"}
