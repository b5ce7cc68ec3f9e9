"""Laws of a tenant's limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.admission.concurrency_slots import ConcurrencySlots
from prfaas.core.admission.fair_slots import FairSettings
from prfaas.core.admission.quotas import MINUTE_NS, Limit, Quota, TenantLimits, TokenBucket
from prfaas.units import NS_PER_S

STEPS = st.lists(st.tuples(st.integers(0, 10**11), st.integers(0, 10_000)), max_size=30)


@given(units=st.integers(1, 10**6), steps=STEPS)
def test_no_more_is_used_than_a_full_bucket_and_what_has_flowed_in(
    units: int, steps: list[tuple[int, int]]
) -> None:
    bucket, now_ns, used, last = TokenBucket(units, MINUTE_NS), 0, 0, 0
    for passed_ns, amount in steps:
        now_ns += passed_ns
        if bucket.wait_ns(now_ns) == 0:
            bucket.take(amount, now_ns)
            used, last = used + amount, amount
    assert (used - last) * MINUTE_NS <= units * (MINUTE_NS + now_ns)


@given(units=st.integers(1, 10**6), taken=st.integers(0, 10**7), now_ns=st.integers(0, 10**15))
def test_after_the_wait_there_is_a_unit_and_not_before(units: int, taken: int, now_ns: int) -> None:
    bucket = TokenBucket(units, MINUTE_NS)
    bucket.take(taken, now_ns)
    assert bucket.left(now_ns) == max(0, units - taken)
    wait_ns = bucket.wait_ns(now_ns)
    assert (wait_ns == 0) == (bucket.left(now_ns) > 0)
    if wait_ns:
        assert bucket.left(now_ns + wait_ns - 1) == 0
        assert bucket.left(now_ns + wait_ns) == 1
    full_ns = bucket.full_in_ns(now_ns)
    assert bucket.left(now_ns + full_ns) == units


def test_a_clock_that_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(60, MINUTE_NS)
    bucket.take(60, 100)
    assert bucket.left(50) == 0
    assert bucket.wait_ns(50) == NS_PER_S


def test_each_limit_refuses_by_its_name() -> None:
    quota = Quota(TenantLimits(requests_per_minute=2, tokens_per_minute=100, requests_in_flight=1))
    quota.enter(0)
    over = quota.over(0)
    assert over is not None
    assert (over.limit, over.allowed) == (Limit.IN_FLIGHT, 1)
    quota.leave()
    quota.count_tokens(150, 0)
    over = quota.over(0)
    assert over is not None
    assert over.limit is Limit.TOKENS
    assert over.retry_after_ns == pytest.approx(MINUTE_NS * 51 / 100)
    quota.enter(0)
    quota.leave()
    over = quota.over(0)
    assert over is not None
    assert (over.limit, over.retry_after_ns) == (Limit.REQUESTS, MINUTE_NS // 2)
    assert quota.over(MINUTE_NS) is None


def test_without_limits_everything_comes_in() -> None:
    quota = Quota(TenantLimits())
    for _ in range(1000):
        quota.enter(0)
    quota.count_tokens(10**12, 0)
    quota.ship(10**12, 0)
    assert quota.over(0) is None
    assert quota.may_ship(0)


def test_links_are_used_at_the_rate_in_the_long_run() -> None:
    quota = Quota(TenantLimits(link_bytes_per_s=1000))
    assert quota.may_ship(0)
    quota.ship(5000, 0)
    assert not quota.may_ship(4 * NS_PER_S)
    assert quota.may_ship(4 * NS_PER_S + NS_PER_S // 1000)


def test_a_full_gateway_leaves_places_to_who_had_fewer() -> None:
    places = ConcurrencySlots(10, FairSettings())
    assert [places.enter("greedy", now) for now in range(12)] == [True] * 10 + [False] * 2
    assert not places.enter("small", 20)
    # The places that fall free are not the greedy one's again.
    places.leave()
    assert not places.enter("greedy", 30)
    assert places.enter("small", 40)
    for _ in range(7):
        places.leave()
    assert places.num_taken == 3
    assert places.enter("greedy", 50)
    assert not places.enter("greedy", 60)
    assert places.enter("small", 70)


def test_alone_a_tenant_has_every_place() -> None:
    places = ConcurrencySlots(10, FairSettings())
    for now in range(100):
        assert places.enter("a", now)
        places.leave()
    assert [places.enter("a", 1000 + now) for now in range(11)] == [True] * 10 + [False]


def test_places_go_by_weight() -> None:
    places = ConcurrencySlots(10, FairSettings({"heavy": 20.0}))
    for now in range(5):
        assert places.enter("heavy", now)
        assert places.enter("light", now)
    assert not places.enter("light", 10)
    assert not places.enter("heavy", 11)
    places.leave()
    assert not places.enter("light", 12)
    assert places.enter("heavy", 13)
