"""Leases of a site's budget: fair, never more than the budget, safe without a gateway."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.transfer.site_budget import (
    GONE_NS,
    IDLE_SHARE,
    LEASE_NS,
    RISE_NS,
    TICK_NS,
    HeldLeases,
    Lease,
    allocate,
    demand,
    equal_share,
    idle_share,
)
from prfaas.gateway.loops.ticker import LeaseGiver
from prfaas.units import NS_PER_S
from prfaas.wire.channel import SILENCE_MAX_S
from prfaas.wire.messages.base import Message, Ping
from prfaas.wire.messages.gateway import LinkLease, LinkTelemetry

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


def link(queued_bytes: int) -> LinkTelemetry:
    """A link with that backlog."""
    return LinkTelemetry(
        age_ns=0,
        goodput_bits_per_s=0,
        rtt_ns=0,
        queued_bytes=queued_bytes,
        in_flight_bytes=0,
        retransmits=0,
        delivery_bits_per_s=0,
        window_segments=0,
        num_connections=1,
    )


class Site:
    """A gateway, and three pool nodes that follow what arrives.

    They answer pings. A connection that breaks stands until it was silent for `SILENCE_MAX_S`.
    """

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.now_ns = 0
        self.all = names
        self.nodes = {name: HeldLeases(BUDGET, len(names)) for name in names}
        self.wanted = dict.fromkeys(names, 0.0)
        self.reached = set(names)
        self.alive = set(names)
        self.has_gateway = True
        self.answered = dict.fromkeys(names, 0)
        self.restart()
        for _ in range(LEASE_NS // TICK_NS - 1):
            self.tick()

    def restart(self) -> None:
        """A gateway begins: it knows nothing of the leases that the pool nodes have."""
        pools: Any = self
        self.giver = LeaseGiver([(BUDGET, frozenset(self.all))], pools, lambda: self.now_ns)

    def tick(self) -> int:
        """Let a tick pass; return the most that all nodes may send within it."""
        self.now_ns += TICK_NS
        before = self.sum()
        if self.has_gateway:
            self.giver.tick()
        return max(before, self.sum())

    # --- connections of the gateway ---

    def names(self) -> list[str]:
        return list(self.all)

    def answered_ns(self, pool: str) -> int:
        is_silent = self.now_ns - self.answered[pool] > SILENCE_MAX_S * NS_PER_S
        return 0 if is_silent else self.answered[pool]

    def telemetry(self) -> dict[tuple[str, str], LinkTelemetry]:
        return {(name, "far"): link(int(self.wanted[name] / 8)) for name in self.all}

    def send(self, pool: str, message: Message) -> bool:
        if pool in self.reached & self.alive:
            if isinstance(message, LinkLease):
                lease = Lease(message.bits_per_s, message.for_ns)
                self.nodes[pool].take("gateway", lease, self.now_ns)
            else:
                assert isinstance(message, Ping)
                self.answered[pool] = message.at_ns
        return True

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
    assert site.rate("a") == equal_share(BUDGET, 3)
    for _ in range(RISE_NS // TICK_NS):
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


@pytest.mark.parametrize("names", [NAMES[:2], NAMES])
def test_a_holder_with_a_small_lease_that_is_cut_off_costs_nothing(names: tuple[str, ...]) -> None:
    """Its lease runs out to the equal share before the gateway takes the connection for dead."""
    site = Site(names)
    site.wanted["a"] = HUNGRY
    for _ in range(4):
        site.tick()
    assert site.rate("b") == idle_share(BUDGET, len(names))
    site.reached -= {"b"}

    assert all(site.tick() <= BUDGET for _ in range(GONE_NS // TICK_NS))

    assert site.rate("b") == equal_share(BUDGET, len(names))


def test_all_that_are_cut_off_one_after_the_other_stay_within_the_budget() -> None:
    """Those with small leases rise to the equal share: the large one has ended by then."""
    site = Site()
    site.wanted["a"] = HUNGRY
    for _ in range(4):
        site.tick()
    site.reached -= {"b", "c"}
    for _ in range(LEASE_NS // TICK_NS - 1):
        assert site.tick() <= BUDGET
    assert site.rate("a") > 0.9 * BUDGET
    site.reached = set()

    sums = [site.tick() for _ in range(2 * LEASE_NS // TICK_NS)]

    assert max(sums) <= BUDGET
    assert sums[-1] == BUDGET


def test_a_large_lease_is_not_renewed_beside_one_that_may_have_risen() -> None:
    """The small lease of a holder that answers again is lost: it rises to the equal share."""
    site = Site()
    site.wanted["a"] = HUNGRY
    for _ in range(4):
        site.tick()
    site.reached -= {"b", "c"}
    sums = [site.tick() for _ in range(LEASE_NS // TICK_NS - 1)]
    for cut_off in [set(), {"b", "c"}, {"b", "c"}, *[set(NAMES)] * 8]:
        site.reached = set(NAMES) - cut_off
        sums.append(site.tick())

    assert max(sums) <= BUDGET


def test_a_lease_that_was_lost_is_not_given_to_others() -> None:
    """Its holder has the larger one of before, and answers again before that one has ended."""
    site = Site()
    site.wanted["a"] = HUNGRY
    for _ in range(4):
        site.tick()
    assert site.rate("a") > 0.9 * BUDGET
    site.wanted |= {"a": 0.0, "b": HUNGRY}
    site.reached -= {"a"}
    assert all(site.tick() <= BUDGET for _ in range(3))
    site.reached |= {"a"}

    assert all(site.tick() <= BUDGET for _ in range(3))

    assert site.rate("b") > 0.9 * BUDGET


@pytest.mark.parametrize("names", [NAMES[:2], NAMES])
@pytest.mark.parametrize("cut_off", ["a", "b", ""])
def test_a_gateway_that_restarts_waits_for_the_leases_of_before(
    names: tuple[str, ...], cut_off: str
) -> None:
    site = Site(names)
    site.wanted["a"] = HUNGRY
    for _ in range(4):
        site.tick()
    assert site.rate("a") > BUDGET / 2
    site.restart()
    site.reached -= {cut_off}
    site.wanted["b"] = HUNGRY

    sums = [site.tick() for _ in range(GONE_NS // TICK_NS)]

    assert max(sums) <= BUDGET
    if not cut_off:
        idle = (len(names) - 2) * idle_share(BUDGET, len(names))
        assert site.rate("a") == site.rate("b") == (BUDGET - idle) // 2


STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e9), max_size=3),
        st.sampled_from(["stays"] * 6 + ["is away"] * 2 + ["restarts"]),
        st.sets(st.sampled_from(NAMES)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(STEPS)
def test_demands_cuts_and_gateways_that_come_and_go_never_exceed_the_budget(
    steps: list[tuple[dict[str, float], str, set[str]]],
) -> None:
    """Whatever is asked for, while nobody is cut off from gateways for `GONE_NS`."""
    site = Site()
    unseen = dict.fromkeys(NAMES, 0)
    for wanted, gateway, cut_off in steps:
        late = {n for n in NAMES if (unseen[n] + 2) * TICK_NS >= GONE_NS}
        site.has_gateway = gateway != "is away" or bool(late)
        site.reached = set(NAMES) - cut_off | late
        if gateway == "restarts":
            site.restart()
        site.wanted |= wanted
        assert site.tick() <= BUDGET
        for name in NAMES:
            is_seen = site.has_gateway and name in site.reached
            unseen[name] = 0 if is_seen else unseen[name] + 1


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
    assert held.bits_per_s(LEASE_NS) <= BUDGET // 3
    assert held.bits_per_s(LEASE_NS + RISE_NS) == BUDGET // 3
