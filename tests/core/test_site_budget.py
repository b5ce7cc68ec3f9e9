"""Leases of a site's budget: fair, never more than the budget, safe without a gateway."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.transfer.site_budget import (
    GONE_NS,
    IDLE_SHARE,
    LEASE_NS,
    TICK_NS,
    HeldLeases,
    Lease,
    LeaseBook,
    allocate,
    demand,
    equal_share,
    idle_share,
)

BUDGET = 9_000_000
NAMES = ("a", "b", "c")
HUNGRY = 1e12


@given(
    st.integers(1, 10**12),
    st.dictionaries(st.text(max_size=3), st.floats(0, 1e13), min_size=1, max_size=8),
)
def test_an_allocation_is_within_the_budget_and_fair(
    budget: int, demands: dict[str, float]
) -> None:
    found = allocate(budget, demands)

    assert sum(found.values()) <= budget
    for poor in found:
        if found[poor] + 2 < demands[poor]:  # It has less than it asks for: nobody has more.
            assert all(found[rich] <= found[poor] + 2 for rich in found)


def test_what_nobody_asks_for_is_shared_and_idle_holders_keep_a_little() -> None:
    assert allocate(BUDGET, dict.fromkeys(NAMES, 0.0)) == dict.fromkeys(NAMES, BUDGET // 3)
    found = allocate(BUDGET, {"a": HUNGRY, "b": HUNGRY, "c": 0.0})

    assert found["c"] == IDLE_SHARE * BUDGET / 3
    assert found["a"] == found["b"] == (BUDGET - found["c"]) // 2
    assert allocate(BUDGET, {}) == {}


def test_a_backlog_is_a_demand() -> None:
    assert demand(0, 10**9) == 0
    assert demand(10**6, 0) == 8e6
    assert demand(1, 10**9) == 10**9


class Site:
    """A gateway's book, and three pool nodes that follow what arrives."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.book = LeaseBook(BUDGET, NAMES, 0)
        self.nodes = {name: HeldLeases(BUDGET, len(NAMES)) for name in NAMES}
        self.wanted = dict.fromkeys(NAMES, 0.0)
        self.reached = set(NAMES)
        self.alive = set(NAMES)
        self.has_gateway = True

    def tick(self) -> int:
        """Let a tick pass; return the most that all nodes may send within it."""
        self.now_ns += TICK_NS
        before = self.sum()
        if self.has_gateway:
            for name in self.reached & self.alive:
                self.book.heard(name, self.wanted[name], self.now_ns)
            for name, lease in self.book.leases(self.now_ns).items():
                if name in self.reached & self.alive:
                    self.nodes[name].take("gateway", lease, self.now_ns)
        return max(before, self.sum())

    def sum(self) -> int:
        return sum(self.nodes[name].bits_per_s(self.now_ns) for name in self.alive)

    def rate(self, name: str) -> int:
        return self.nodes[name].bits_per_s(self.now_ns)


def test_a_holder_with_nothing_to_send_gives_up_its_share_within_two_ticks() -> None:
    site = Site()
    site.wanted |= {"a": HUNGRY, "b": HUNGRY}

    assert all(site.tick() <= BUDGET for _ in range(3))

    assert site.rate("a") == site.rate("b") > 1.4 * BUDGET / 3
    site.wanted |= {"b": 0.0, "c": HUNGRY}
    assert all(site.tick() <= BUDGET for _ in range(3))
    assert site.rate("a") == site.rate("c") > 1.4 * BUDGET / 3
    assert site.rate("b") == IDLE_SHARE * BUDGET / 3


def test_a_dead_holder_loses_its_share() -> None:
    site = Site()
    site.wanted = dict.fromkeys(NAMES, HUNGRY)
    for _ in range(3):
        site.tick()
    site.alive -= {"c"}

    sums = [site.tick() for _ in range(GONE_NS // TICK_NS + 3)]

    assert max(sums) <= BUDGET
    assert site.rate("a") == site.rate("b") == BUDGET // 2


def test_without_a_gateway_leases_run_out_to_equal_shares() -> None:
    site = Site()
    site.wanted["a"] = HUNGRY
    for _ in range(3):
        site.tick()
    assert site.rate("a") > 0.9 * BUDGET
    site.has_gateway = False

    for _ in range(LEASE_NS // TICK_NS):
        assert site.tick() <= BUDGET

    assert {site.rate(name) for name in NAMES} == {equal_share(BUDGET, 3)}


def test_a_holder_that_the_gateway_lost_costs_one_equal_share_at_most() -> None:
    """It runs, and nobody can say so: this is the slack."""
    site = Site()
    site.wanted = dict.fromkeys(NAMES, HUNGRY)
    for _ in range(3):
        site.tick()
    site.reached -= {"c"}
    before_gone = [site.tick() for _ in range(GONE_NS // TICK_NS)]
    after = [site.tick() for _ in range(6)]

    assert max(before_gone) <= BUDGET
    assert BUDGET < max(after) <= BUDGET + equal_share(BUDGET, 3)


def test_a_holder_keeps_the_part_of_an_idle_one_while_others_are_not_heard_of() -> None:
    """Both may send all of the budget; at one bit a second its sockets would stop for hours."""
    site = Site()
    site.wanted["a"] = HUNGRY
    for _ in range(3):
        site.tick()
    site.reached -= {"a", "c"}

    rates = []
    for _ in range(GONE_NS // TICK_NS):
        site.tick()
        rates.append(site.rate("b"))

    assert min(rates) == idle_share(BUDGET, 3)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e9), max_size=3),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_demands_and_gateways_that_come_and_go_never_exceed_the_budget(
    steps: list[tuple[dict[str, float], bool]],
) -> None:
    """A gateway that is away for less than `GONE_NS`, whatever is asked for."""
    site, away = Site(), 0
    for wanted, has_gateway in steps:
        away = 0 if has_gateway else away + 1
        site.has_gateway = has_gateway or away >= GONE_NS // TICK_NS - 2
        site.wanted |= wanted
        assert site.tick() <= BUDGET


def test_of_two_gateways_the_smaller_lease_holds() -> None:
    held = HeldLeases(BUDGET, 3)

    held.take("one", Lease(5_000_000, LEASE_NS), 0)
    held.take("two", Lease(4_000_000, LEASE_NS // 2), 0)

    assert held.bits_per_s(1) == 4_000_000
    assert held.bits_per_s(LEASE_NS // 2) == 5_000_000
    assert held.bits_per_s(LEASE_NS) == BUDGET // 3


@pytest.mark.parametrize("lease", [Lease(10**15, 10**18), Lease(0, 10**18)])
def test_a_lease_is_bounded(lease: Lease) -> None:
    held = HeldLeases(BUDGET, 3)

    held.take("gateway", lease, 0)

    assert idle_share(BUDGET, 3) <= held.bits_per_s(1) <= BUDGET
    assert held.bits_per_s(LEASE_NS) == BUDGET // 3
