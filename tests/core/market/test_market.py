"""The choice by cost: what is minimised, what excludes, what stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
)
from prfaas.core.market.choice import (
    DAY_NS,
    NS_PER_H,
    ClusterOffer,
    Exclusion,
    Quote,
    RequestTerms,
    Revocation,
    SitePrice,
    Tariff,
    choose,
    flat,
    quote,
)
from prfaas.core.market.market import Market
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.core.dispatching import MS, costs, sent

S = NS_PER_S
HOME = ClusterOffer("home", 2 * S, 0, 2 * S)
FAR = ClusterOffer("far", S, 10**9, S, remote_ns=S)
QUOTES = {"home": Quote(1.0, 1.0 / S, 0.0), "far": Quote(1.0, 0.5 / S, 0.5e-9)}


def test_the_cost_is_compute_bytes_and_time() -> None:
    found = choose([HOME, FAR], QUOTES, RequestTerms(second_price=0.25))
    local, far = found.costed
    assert (local.gpu_cost, local.link_cost, local.time_cost) == (2.0, 0.0, 0.5)
    assert (far.gpu_cost, far.link_cost, far.time_cost) == (0.5, 0.5, 0.25)
    assert found.best is far


@pytest.mark.parametrize(
    ("there", "terms", "offer", "why"),
    [
        (Quote(1, 0, 0, leaves_in_ns=0), RequestTerms(), FAR, Exclusion.REVOKED),
        (Quote(1, 0, 0, leaves_in_ns=S), RequestTerms(), FAR, Exclusion.LEAVES_FIRST),
        (Quote(1, 0, 0, leaves_in_ns=S + 1), RequestTerms(), FAR, ""),
        (Quote(1, 0, 0, notice_ns=S - 1), RequestTerms(), FAR, Exclusion.NOTICE_TOO_SHORT),
        (Quote(1, 0, 0, notice_ns=S), RequestTerms(), FAR, ""),
        (Quote(1, 0, 0), RequestTerms(0.0, S - 1), FAR, Exclusion.LATE),
        (Quote(1, 0, 0), RequestTerms(0.0, S), FAR, ""),
        (Quote(1, 0, 0), RequestTerms(), FAR._replace(ttft_ns=None), Exclusion.NOT_PREDICTED),
        (Quote(1, 0, 0), RequestTerms(), FAR._replace(excluded="link_down"), "link_down"),
        (None, RequestTerms(), FAR, Exclusion.NO_PRICE),
    ],
)
def test_what_excludes_a_cluster_is_named(
    there: Quote | None, terms: RequestTerms, offer: ClusterOffer, why: str
) -> None:
    quotes = {} if there is None else {"far": there}
    [found] = choose([offer], quotes, terms).costed
    assert found.excluded == why


LATE = RequestTerms(1.0, ttft_max_ns=1)


def test_where_all_are_late_the_least_late_is_chosen() -> None:
    """FAR takes half the time; a price of ten times as much does not turn that."""
    dear = QUOTES | {"far": Quote(10.0, 5.0 / S, 0.5e-9)}
    for quotes in (QUOTES, dear):
        found = choose([HOME, FAR], quotes, LATE).best
        assert found is not None
        assert (found.offer.cluster, found.excluded) == ("far", Exclusion.LATE)


def test_of_equally_late_ones_the_cheaper_is_chosen() -> None:
    """4 % later counts as equally late, 6 % later does not."""
    for share, cheapest in ((1.04, "far"), (1.06, "home")):
        offers = [HOME._replace(ttft_ns=20 * S), FAR._replace(ttft_ns=round(20 * S * share))]
        found = choose(offers, QUOTES, LATE, hysteresis=0.05).best
        assert found is not None
        assert found.offer.cluster == cheapest


def test_a_late_cluster_that_leaves_is_no_choice() -> None:
    remote = FAR._replace(excluded="link_down")
    assert choose([remote], QUOTES, LATE).best is None
    leaves = QUOTES | {"far": Quote(1.0, 0.1 / S, 0.0, leaves_in_ns=0)}
    found = choose([HOME, FAR], leaves, LATE).best
    assert found is not None
    assert found.offer.cluster == "home"
    assert choose([HOME._replace(excluded="no_prefill_instance"), FAR], leaves, LATE).best is None


def test_a_small_crossing_of_prices_leaves_the_incumbent() -> None:
    """4 % apart, a hysteresis of 5 % keeps what was chosen last; 6 % apart it does not."""
    for gain, stays in ((0.04, True), (0.06, False)):
        quotes = QUOTES | {
            "home": Quote(1.0, 1.0 / S, 0.0),
            "far": Quote(1.0, (2 - 2 * gain) / S, 0),
        }
        offers = [HOME, FAR._replace(num_bytes=0)]
        found = choose(offers, quotes, RequestTerms(), "home", 0.05).best
        assert found is not None
        assert (found.offer.cluster == "home") is stays
        fresh = choose(offers, quotes, RequestTerms(), "", 0.05).best
        assert fresh is not None
        assert fresh.offer.cluster == "far"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**12), st.integers(0, 10**12), st.none() | st.integers(0, 10**11)
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 1),
    st.floats(0, 0.5),
    st.integers(0, 6),
)
def test_the_best_is_feasible_and_never_beaten_by_more_than_the_hysteresis(
    drawn: list[tuple[int, int, int | None]], second: float, hysteresis: float, last: int
) -> None:
    offers = [ClusterOffer(f"c{i}", *each) for i, each in enumerate(drawn)]
    quotes = {o.cluster: Quote(1.0, 1e-12 * (i + 1), 1e-12) for i, o in enumerate(offers)}
    terms = RequestTerms(second, 5 * 10**10)
    found = choose(offers, quotes, terms, f"c{last}", hysteresis)
    feasible = [each for each in found.costed if not each.excluded]
    late = [each.offer.ttft_ns or 0 for each in found.costed if each.excluded == Exclusion.LATE]
    if not feasible:
        assert (found.best is None) == (not late)
        if found.best is not None:
            assert (found.best.offer.ttft_ns or 0) * (1 - hysteresis) <= min(late)
        return
    assert found.best in feasible
    least = min(each.total for each in feasible)
    assert found.best.total * (1 - hysteresis) <= least * (1 + 1e-9)


def test_prices_follow_the_time_of_day() -> None:
    price = SitePrice(Tariff((8 * NS_PER_H, 20 * NS_PER_H), (3.0, 1.0)), gpus=8)
    for hour, per_gpu_h in ((7, 1.0), (8, 3.0), (19, 3.0), (20, 1.0), (24 + 9, 3.0)):
        found = quote(price, (), 0, 5 * DAY_NS + hour * NS_PER_H)
        assert found.per_gpu_h == per_gpu_h
        assert found.per_instance_ns == pytest.approx(8 * per_gpu_h / NS_PER_H)


def test_a_revocation_counts_from_its_notice_to_its_end() -> None:
    revoked = (Revocation(10, 20, 30),)
    seen = [quote(SitePrice(flat(1)), revoked, now, now).leaves_in_ns for now in (9, 10, 25, 30)]
    assert seen == [None, 10, -5, None]


# In the dispatcher


def market(**per_gpu_h: float) -> Market:
    return Market({name: SitePrice(flat(price)) for name, price in per_gpu_h.items()})


def dispatcher(
    found: Market | None, policy: PolicyName = PolicyName.COST, ttft_max_ns: int | None = None
) -> Dispatcher:
    """A PD instance, and two PrfaaS clusters: "slow" and "fast"."""
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("h0", "home-0"),), None, costs()),
        [
            RemoteCluster("slow", (ClusterMember("s0", "slow"),), costs(250_000)),
            RemoteCluster("fast", (ClusterMember("f0", "fast"),), costs()),
        ],
        DispatchSettings(policy, 1000, ttft_max_ns=ttft_max_ns, second_price=1e-6, market=found),
    )
    for name in ("h0", "s0", "f0"):
        made.set_ready(name, ready=True, now_ns=0)
        made.describe(name, num_tokens_max=10**6, layout_id=b"one")
    for source in ("slow", "fast"):
        made.set_link(source, "home-0", up=True)
        made.links.report(source, "home-0", LinkReport(0, 1e10, 0, 0, MS))
    return made


@pytest.mark.parametrize(
    ("prices", "cluster", "reason"),
    [
        ({"pd": 10.0, "slow": 10.0, "fast": 1.0}, "fast", Reason.CHEAPEST_REMOTE),
        ({"pd": 10.0, "slow": 1.0, "fast": 10.0}, "slow", Reason.CHEAPEST_REMOTE),
        ({"pd": 0.1, "slow": 10.0, "fast": 10.0}, "pd", Reason.CHEAPEST_LOCAL),
    ],
)
def test_a_request_goes_where_it_costs_least(
    prices: dict[str, float], cluster: str, reason: Reason
) -> None:
    made = dispatcher(market(**prices))
    routed = sent(made.arrive(Arrival(1, 8000, 0), 1))
    assert (routed.cluster, routed.decision.reason) == (cluster, reason)
    choice = routed.decision.choice
    assert choice is not None
    assert [each.offer.cluster for each in choice.costed] == ["pd", "slow", "fast"]
    assert made.market is not None
    assert made.market.num_sent[cluster] == 1
    assert choice.best is not None
    assert made.market.spent == pytest.approx(choice.best.money)


def test_a_cheap_cluster_that_cannot_be_used_is_not_chosen() -> None:
    made = dispatcher(market(pd=10.0, slow=5.0, fast=0.0))
    made.set_link("fast", "home-0", up=False)
    routed = sent(made.arrive(Arrival(1, 8000, 0), 1))
    assert routed.cluster == "slow"
    choice = routed.decision.choice
    assert choice is not None
    assert choice.costed[2].excluded == Reason.LINK_DOWN
    made.set_link("slow", "home-0", up=False)
    routed = sent(made.arrive(Arrival(2, 8000, 0), 1))
    assert (routed.cluster, routed.decision.reason) == ("pd", Reason.LINK_DOWN)


def test_capacity_with_notice_is_used_and_left_in_time() -> None:
    found = market(pd=10.0, slow=10.0, fast=1.0)
    made = dispatcher(found)
    found.revoke("fast", Revocation(0, 2 * S, 5 * S))
    work_ns = 800 * MS  # of 8,000 tokens
    assert sent(made.arrive(Arrival(1, 8000, 0), 1)).cluster == "fast"
    made.requests.end(1, 2)
    late = sent(made.arrive(Arrival(2, 8000, 0), 2 * S - work_ns))
    assert late.cluster != "fast"
    choice = late.decision.choice
    assert choice is not None
    assert choice.costed[2].excluded == Exclusion.LEAVES_FIRST
    assert sent(made.arrive(Arrival(3, 4000, 0), 2 * S - work_ns)).cluster == "fast"


def test_without_a_feasible_cluster_the_request_stays_home() -> None:
    found = market(pd=10.0, slow=1.0, fast=1.0)
    made = dispatcher(found)
    for name in ("slow", "fast"):
        found.revoke(name, Revocation(0, 1))
    routed = sent(made.arrive(Arrival(1, 8000, 0), 2))
    assert (routed.decision.path, routed.decision.reason) == (Path.LOCAL, Reason.NONE_FEASIBLE)
    assert "no PrfaaS cluster is in time" in routed.decision.explanation


def test_a_request_that_is_late_everywhere_goes_where_it_is_least_late() -> None:
    """The PD cluster takes ten times as long and costs ten times as much."""
    made = dispatcher(market(pd=10.0, slow=1.0, fast=1.0), ttft_max_ns=MS)
    routed = sent(made.arrive(Arrival(1, 8000, 0), 1))
    assert (routed.cluster, routed.decision.reason) == ("fast", Reason.LEAST_LATE)
    assert "late wherever it goes" in routed.decision.explanation
    found = made.market
    assert found is not None
    found.revoke("fast", Revocation(0, 1))
    made.set_link("slow", "home-0", up=False)
    routed = sent(made.arrive(Arrival(4, 8000, 0), 2))
    assert (routed.cluster, routed.decision.reason) == ("pd", Reason.NONE_FEASIBLE)


def test_a_choice_among_late_ones_makes_no_incumbent() -> None:
    found = market(pd=10.0, slow=10.0, fast=1.0)
    late = dispatcher(found, ttft_max_ns=MS)
    late.arrive(Arrival(1, 8000, 0), 1)
    found.set_price("slow", SitePrice(flat(0.39)))
    in_time = dispatcher(found)
    assert sent(in_time.arrive(Arrival(1, 8000, 0), 1)).cluster == "slow"


def test_a_foreseen_route_changes_no_incumbent() -> None:
    found = market(pd=10.0, slow=10.0, fast=1.0)
    made = dispatcher(found)
    made.foresee(Arrival(1, 8000, 0), 1)
    found.set_price("slow", SitePrice(flat(0.39)))
    # Without an incumbent, 2 % cheaper is enough.
    assert sent(made.arrive(Arrival(1, 8000, 0), 1)).cluster == "slow"


@pytest.mark.parametrize("policy", [each for each in PolicyName if each is not PolicyName.COST])
def test_prices_change_no_decision_of_another_policy(policy: PolicyName) -> None:
    with_prices, without = (dispatcher(m, policy) for m in (market(pd=9.0, slow=1, fast=1), None))
    for number, length in enumerate((500, 900, 2000, 8000, 30_000)):
        found, usual = (
            sent(made.arrive(Arrival(number, length, 0), number)) for made in (with_prices, without)
        )
        assert found == usual
        assert found.decision.choice is None
    assert with_prices.market is not None
    assert sum(with_prices.market.num_sent.values()) == 5


def test_another_order_is_a_comparison_policy() -> None:
    found = market(pd=1.0, slow=2.0, fast=50.0)
    found.order = lambda costed: costed.offer.ttft_ns or 0
    assert sent(dispatcher(found).arrive(Arrival(1, 8000, 0), 1)).cluster == "fast"
    assert replace(DispatchSettings(PolicyName.COST, 1), market=found).market is found
