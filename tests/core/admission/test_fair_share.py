"""Fair admission against one queue that is asked for more than it can do."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.admission.fair_slots import TENANTS_MAX, FairSettings, FairShare
from prfaas.units import NS_PER_S

TARGET_NS = 10 * NS_PER_S


def served(
    rates_per_s: dict[str, float], weights: dict[str, float], seed: int, hours: float = 0.5
) -> dict[str, float]:
    """Seconds of work let in for each tenant by a server that does one second of work a second."""
    random = Random(seed)
    fair = FairShare(FairSettings(weights))
    names, total = list(rates_per_s), sum(rates_per_s.values())
    let_in = dict.fromkeys(names, 0.0)
    now_s = free_s = 0.0
    while now_s < hours * 3600:
        now_s += random.expovariate(total)
        tenant = random.choices(names, list(rates_per_s.values()))[0]
        work_s, now_ns = random.uniform(0.2, 1.8), round(now_s * NS_PER_S)
        predicted_s = max(free_s - now_s, 0.0) + work_s
        if predicted_s * NS_PER_S <= fair.limit(tenant, TARGET_NS, now_ns):
            fair.let_in(tenant, round(work_s * NS_PER_S), now_ns)
            free_s = max(free_s, now_s) + work_s
            let_in[tenant] += work_s
        else:
            fair.refused(tenant, now_ns)
    return {name: work / (hours * 3600) for name, work in let_in.items()}


@settings(max_examples=15, deadline=None)
@given(greed=st.floats(2, 30), seed=st.integers(0, 1000))
def test_a_greedy_tenant_takes_no_more_than_its_share(greed: float, seed: int) -> None:
    found = served({"greedy": greed, "b": 1.0, "c": 1.0}, {}, seed)
    assert sum(found.values()) > 0.95
    # Each asks for at least a third of what there is.
    assert all(share == pytest.approx(1 / 3, abs=0.06) for share in found.values())


def test_weights_are_shares() -> None:
    found = served({"a": 5.0, "b": 2.0}, {"a": 1.0, "b": 3.0}, 1)
    assert found["b"] / found["a"] == pytest.approx(3.0, rel=0.15)


def test_who_asks_for_less_than_its_share_gets_it_and_the_rest_is_shared() -> None:
    found = served({"a": 10.0, "b": 2.0, "small": 0.1}, {}, 1)
    assert found["small"] > 0.08
    assert found["a"] == pytest.approx(found["b"], rel=0.15)
    assert sum(found.values()) > 0.95


def test_alone_and_without_overload_everybody_has_the_whole_target() -> None:
    fair = FairShare(FairSettings())
    for i in range(100):
        now_ns = i * NS_PER_S
        assert fair.limit("a", TARGET_NS, now_ns) == TARGET_NS
        fair.let_in("a", NS_PER_S, now_ns)
        assert fair.limit("b", TARGET_NS, now_ns) == TARGET_NS
    fair.refused("a", 100 * NS_PER_S)
    assert fair.limit("a", TARGET_NS, 100 * NS_PER_S) == TARGET_NS
    fair.refused("b", 100 * NS_PER_S)
    assert fair.limit("a", TARGET_NS, 100 * NS_PER_S) < TARGET_NS
    assert fair.limit("b", TARGET_NS, 100 * NS_PER_S) == TARGET_NS
    assert fair.limit("a", TARGET_NS, 200 * NS_PER_S) == TARGET_NS


def test_accounts_are_limited() -> None:
    fair = FairShare(FairSettings(window_ns=1))
    for i in range(TENANTS_MAX + 100):
        fair.let_in(f"t{i}", NS_PER_S, i * NS_PER_S)
    assert len(fair._accounts) == TENANTS_MAX
