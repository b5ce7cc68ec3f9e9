"""Without a plan, how long prefills take is learnt from those that answered."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
)
from prfaas.core.resilience.late_routes import patience_ns
from prfaas.core.routing.observed import NOMINAL_NS_PER_TOKEN, PACE, ObservedRates
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S


def test_a_rate_is_learnt_from_enough_answers() -> None:
    rates = ObservedRates()
    for number in range(PACE.num_min):
        rates.sent(number, "far", 1000, 1000, 0)
        assert rates.expected_ns(number) is None
        rates.answered(number, 7000)
    rates.sent(99, "far", 3000, 3000, 0)
    assert rates.expected_ns(99) == pytest.approx(21_000, rel=0.01)
    found = rates.estimate("far", 100, 100, 7000)
    assert found is not None
    assert found.ns == pytest.approx(700, rel=0.01)
    assert rates.estimate("near", 100, 100, 7000) is None
    rates.drop(99)
    assert rates.expected_ns(99) is None


def test_what_was_dropped_teaches_nothing() -> None:
    rates = ObservedRates()
    for number in range(20):
        rates.sent(number, "far", 1000, 1000, 0)
        rates.drop(number)
        rates.answered(number, 7000)
    assert rates.estimate("far", 100, 100, 7000) is None


def test_patience_is_some_times_what_is_expected_and_two_seconds_at_least() -> None:
    assert patience_ns(NS_PER_S) == 4 * NS_PER_S
    assert patience_ns(1) == 2 * NS_PER_S


def test_a_dispatcher_without_a_plan_expects_what_it_has_seen() -> None:
    """3 ms a token in the PrfaaS cluster; a request behind another one takes both their times."""
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("p0", "pd"),)),
        [RemoteCluster("far", (ClusterMember("r0", "far"),))],
        DispatchSettings(PolicyName.PAPER, 100),
    )
    made.set_link("far", "pd", up=True)
    made.describe("p0", num_tokens_max=10**6, layout_id=b"")
    made.describe("r0", num_tokens_max=10**6, layout_id=b"")
    made.links.report("far", "pd", LinkReport(0, 1e12, 0))
    for name in ("p0", "r0"):
        made.set_ready(name, ready=True, now_ns=0)
    for number in range(PACE.num_min):
        now_ns = number * 100 * NS_PER_S
        routed = made.arrive(Arrival(number, 1000, 0, {}), now_ns)
        assert isinstance(routed, Routed)
        assert routed.prefill == "r0"
        made.requests.prefilled(number, now_ns + 3 * NS_PER_S)
        made.requests.end(number, now_ns + 4 * NS_PER_S)
    now_ns = 10**6 * NS_PER_S
    for name in ("p0", "r0"):
        made.report_load(name, now_ns, 0)
    made.arrive(Arrival(100, 1000, 0, {}), now_ns)
    made.arrive(Arrival(101, 1000, 0, {}), now_ns)
    assert made.expected.prefill_ns(100) == pytest.approx(3 * NS_PER_S, rel=0.01)
    assert made.expected.prefill_ns(101) == pytest.approx(6 * NS_PER_S, rel=0.01)
    assert made.expected.local_prefill_ns("p0", 1000, 0, now_ns) is None
    assert made.load("r0").wait_ns("r0", now_ns) == 2000 * NOMINAL_NS_PER_TOKEN
