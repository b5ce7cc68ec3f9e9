"""Shares of tenants in a tier: reserves, limits, leases, and the cost of an eviction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import FrameType

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.core.cache.eviction import LeastRecentlyUsed
from prfaas.core.cache.tenant_shares import Held, Share, TenantShares

CAPACITY = 100
SHARES = {"a": Share(0.25), "b": Share(0.5, 0.6), "c": Share(0, 0.3)}
TENANTS = ("a", "b", "c", "d", "")


def shared(shares: dict[str, Share], capacity: int = CAPACITY) -> TenantShares[str]:
    made: TenantShares[str] = TenantShares(LeastRecentlyUsed(), capacity)
    made.assign(shares, [])
    return made


class Tier:
    """A tier of blocks of any size, which evicts as pool nodes do."""

    def __init__(self, shares: dict[str, Share], capacity: int = CAPACITY) -> None:
        self.policy = shared(shares, capacity)
        self.capacity = capacity
        self.blocks: dict[str, tuple[str, int]] = {}
        self.num_evicted: dict[str, int] = {}

    def put(self, key: str, tenant: str, size: int = 1) -> bool:
        """Store a block; False if there is no room."""
        if key in self.blocks:
            self.policy.used(key, *self.blocks[key])
            return True
        while self.policy.excess_bytes(tenant, size):
            victim = next(self.policy.own(tenant), None)
            if victim is None:
                return False
            self.evict(victim)
        while sum(size for _, size in self.blocks.values()) + size > self.capacity:
            victim = next(self.policy.order(tenant), None)
            if victim is None:
                return False
            self.evict(victim)
        self.blocks[key] = tenant, size
        self.policy.added(key, tenant, size)
        return True

    def evict(self, key: str) -> None:
        tenant, size = self.blocks.pop(key)
        self.policy.removed(key, tenant, size)
        self.num_evicted[tenant] = self.num_evicted.get(tenant, 0) + 1


def test_a_flood_takes_no_block_of_a_reserve() -> None:
    tier = Tier({"a": Share(0.25)})
    for number in range(40):
        tier.put(f"a{number}", "a")
    for number in range(1000):
        assert tier.put(f"d{number}", "d")
    assert {key for key, (tenant, _) in tier.blocks.items() if tenant == "a"} == {
        f"a{number}" for number in range(15, 40)
    }


def test_without_shares_the_least_recently_used_block_goes_whosever_it_is() -> None:
    tier = Tier({}, 4)
    for key, tenant in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "b")):
        tier.put(key, tenant)
    tier.policy.used("1", "a", 1)
    tier.put("5", "c")
    assert set(tier.blocks) == {"1", "3", "4", "5"}


def test_a_reserve_that_is_not_used_is_there_for_others() -> None:
    tier = Tier({"a": Share(0.5)})
    for number in range(100):
        tier.put(f"d{number}", "d")
    assert len(tier.blocks) == 100
    for number in range(50):
        assert tier.put(f"a{number}", "a")
    assert tier.policy.held_bytes == {"a": 50, "d": 50}


def test_a_block_that_serves_a_hit_returns_to_the_reserve() -> None:
    tier = Tier({"a": Share(0.1)})
    for number in range(20):
        tier.put(f"a{number}", "a")
    tier.policy.used("a0", "a", 1)
    for number in range(200):
        tier.put(f"d{number}", "d")
    assert {key for key in tier.blocks if key.startswith("a")} == {
        "a0", *(f"a{number}" for number in range(11, 20))
    }  # fmt: skip


def test_a_tenant_at_its_limit_evicts_its_own_blocks_only() -> None:
    tier = Tier({"c": Share(0.0, 0.3)})
    for number in range(20):
        tier.put(f"d{number}", "d")
    for number in range(500):
        assert tier.put(f"c{number}", "c")
    assert tier.policy.held_bytes == {"c": 30, "d": 20}
    assert not tier.put("large", "c", 31)


def test_leases_survive_the_way_into_a_reserve_and_out_of_it() -> None:
    shares = shared({"a": Share(0.02)})
    shares.added("1", "a", 1)
    shares.lease("1", "a", 1, 10)
    assert (shares.num_leased, shares.leased_bytes) == (1, 1)
    shares.added("2", "a", 1)
    shares.added("3", "a", 1)
    assert list(shares.order()) == ["1"]
    assert list(shares.order(spare_leased=True)) == []
    shares.expire(10)
    assert list(shares.order(spare_leased=True)) == ["1"]
    shares.lease("2", "a", 1, 20)
    assert list(shares.own("a", spare_leased=True)) == ["1", "3"]
    shares.release("2", "a")
    assert shares.num_leased == shares.leased_bytes == 0


def test_a_copy_is_in_no_reserve() -> None:
    shares = shared({"a": Share(0.5)})
    shares.added("1", "a", 1)
    shares.lease("1", "a", 1, 10, is_copy=True)
    assert shares.copy_bytes == 1
    shares.used("1", "a", 1)
    assert list(shares.order()) == ["1"]


def test_a_pin_outlives_uses_and_ends_with_its_time_or_by_hand() -> None:
    tier = Tier({}, 4)
    for key in "1234":
        tier.put(key, "a")
    tier.policy.pin("1", "a", 1, until_ns=10)
    tier.policy.pin("2", "a", 1, until_ns=20)
    tier.policy.lease("3", "a", 1, 30)
    tier.policy.used("1", "a", 1)
    tier.policy.release("1", "a")
    assert list(tier.policy.order()) == ["4", "3", "1", "2"]
    assert (tier.policy.pinned_bytes, tier.policy.num_leased) == (2, 1)
    tier.policy.expire(10)
    assert list(tier.policy.order(spare_leased=True)) == ["4", "1"]
    tier.policy.unpin("2", "a")
    assert list(tier.policy.order(spare_leased=True)) == ["4", "1", "2"]


def test_a_tenant_at_its_limit_evicts_its_pinned_blocks_last() -> None:
    tier = Tier({"c": Share(0.0, 0.3)})
    for number in range(30):
        tier.put(f"c{number}", "c")
    for number in range(5):
        tier.policy.pin(f"c{number}", "c", 1, until_ns=10)
    for number in range(100, 500):
        assert tier.put(f"c{number}", "c")
    assert {f"c{number}" for number in range(5)} < set(tier.blocks)


def test_a_pinned_copy_is_a_copy_no_longer() -> None:
    shares = shared({})
    shares.added("1", "a", 1)
    shares.lease("1", "a", 1, 10, is_copy=True)
    shares.pin("1", "a", 1, until_ns=20)
    assert (shares.copy_bytes, shares.is_copy("1"), shares.pinned_bytes) == (0, False, 1)


def test_shares_that_change_apply_to_the_blocks_that_are_there() -> None:
    shares = shared({"a": Share(0.5)})
    for number in range(4):
        shares.added(f"a{number}", "a", 10)
        shares.added(f"b{number}", "b", 10)
    assert list(shares.order()) == ["b0", "b1", "b2", "b3"]
    held = [Held(f"{tenant}{number}", tenant, 10) for tenant in "ab" for number in range(4)]
    shares.assign({"b": Share(0.2, 0.3)}, held)
    assert set(shares.order()) == {"a0", "a1", "a2", "a3", "b0", "b1"}
    assert shares.excess_bytes("b") == 10
    shares.assign({}, held)
    assert len(list(shares.order())) == 8


def test_reserves_of_all_gateways_together_leave_room_for_everybody() -> None:
    shares = shared({"a": Share(0.5), "b": Share(0.5)})
    for number in range(50):
        shares.added(f"a{number}", "a", 1)
        shares.added(f"b{number}", "b", 1)
    assert len(list(shares.order())) == 25


def test_an_eviction_calls_as_many_functions_with_a_thousand_tenants_as_with_ten() -> None:
    counts = {number: calls_of_an_eviction(number) for number in (10, 1000)}
    assert counts[1000] == counts[10] <= 60


def calls_of_an_eviction(num_tenants: int) -> int:
    """The most functions that an eviction and the block in its place call."""
    tier: TenantShares[int] = TenantShares(LeastRecentlyUsed(), 10_000)
    share = Share(0.5 / num_tenants, 0.9)
    tier.assign({f"t{number}": share for number in range(num_tenants)}, [])
    for number in range(10_000):
        tier.added(number, f"t{number % num_tenants}", 1)

    def evict(key: int) -> None:
        victim = next(tier.order("t0"))
        tier.removed(victim, f"t{victim % num_tenants}" if victim < 10_000 else "t0", 1)
        tier.added(key, "t0", 1)

    return max(calls(partial(evict, key)) for key in range(10_000, 10_100))


def calls(work: Callable[[], None]) -> int:
    """Number of functions that are called, those in C included."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class SharesAgainstModel(RuleBasedStateMachine):
    """Every block is in one place, reserves and limits hold, and counts agree."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = Tier(dict(SHARES))

    @rule(number=st.integers(0, 60), tenant=st.sampled_from(TENANTS), size=st.integers(1, 12))
    def put(self, number: int, tenant: str, size: int) -> None:
        before = self.reserved()
        self.tier.put(f"{tenant}-{number}", tenant, size)
        after = self.reserved()
        for other in SHARES:
            assert other == tenant or before[other] == after[other]

    @rule(number=st.integers(0, 60), until=st.integers(1, 5), is_copy=st.booleans())
    def lease(self, number: int, until: int, *, is_copy: bool) -> None:
        for key in islice(self.tier.blocks, number, number + 1):
            self.tier.policy.lease(key, *self.tier.blocks[key], until, is_copy=is_copy)

    @rule(number=st.integers(0, 60))
    def use(self, number: int) -> None:
        for key in islice(self.tier.blocks, number, number + 1):
            self.tier.policy.used(key, *self.tier.blocks[key])

    @rule(number=st.integers(0, 60), until=st.integers(1, 5))
    def pin(self, number: int, until: int) -> None:
        for key in islice(self.tier.blocks, number, number + 1):
            self.tier.policy.pin(key, *self.tier.blocks[key], until)
            assert self.tier.policy.is_pinned(key)

    @rule(number=st.integers(0, 60))
    def unpin(self, number: int) -> None:
        for key in islice(self.tier.blocks, number, number + 1):
            self.tier.policy.unpin(key, self.tier.blocks[key][0])
            assert not self.tier.policy.is_pinned(key)

    @rule(now=st.integers(1, 5))
    def expire(self, now: int) -> None:
        self.tier.policy.expire(now)

    @rule(shares=st.sampled_from([SHARES, {}, {"a": Share(0.75)}, {"d": Share(0.1, 0.2)}]))
    def assign(self, shares: dict[str, Share]) -> None:
        held = [Held(key, *owner) for key, owner in self.tier.blocks.items()]
        self.tier.policy.assign(shares, held)

    def reserved(self) -> dict[str, set[str]]:
        evictable = set(self.tier.policy.order())
        return {
            tenant: {
                key
                for key, (owner, _) in self.tier.blocks.items()
                if owner == tenant and key not in evictable
            }
            for tenant in SHARES
        }

    @invariant()
    def everything_is_in_one_place(self) -> None:
        keys = list(self.tier.blocks)
        self.tier.policy.validate(Held(key, *self.tier.blocks[key]) for key in keys)
        assert 0 <= self.tier.policy.num_leased <= len(keys)
        assert self.tier.policy.leased_bytes >= 0
        pinned = {key for key in keys if self.tier.policy.is_pinned(key)}
        assert sum(self.tier.blocks[key][1] for key in pinned) == self.tier.policy.pinned_bytes
        for order in (self.tier.policy.order("a"), self.tier.policy.own("a")):
            behind = [key in pinned for key in order]
            assert behind == sorted(behind)
        assert not pinned & set(self.tier.policy.order("a", spare_leased=True))


TestSharesAgainstModel = SharesAgainstModel.TestCase
TestSharesAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
