"""Requests that are late on every route."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.route_finder import RouteFinder
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
)
from prfaas.core.routing.decision import Path, Reason, RoutingFacts
from prfaas.core.routing.policies import AdaptivePolicy, AdaptiveSettings, PolicyName
from prfaas.core.routing.predictions import Prediction
from prfaas.units import NS_PER_S
from tests.core.known_costs import COSTS

TARGET_NS = 10 * NS_PER_S


def routes(waits_s: Mapping[str, float], policy: PolicyName = PolicyName.ADAPTIVE) -> RouteFinder:
    """Two instances on either side with given queues, and a fast link."""
    made = RouteFinder(
        LocalCluster(
            "pd",
            (ClusterMember("p0", "pd"), ClusterMember("p1", "pd")),
            (ClusterMember("d0", "pd"),),
            COSTS,
        ),
        [RemoteCluster("away", (ClusterMember("r0", "away"), ClusterMember("r1", "away")), COSTS)],
        DispatchSettings(policy, 1000, ttft_max_ns=TARGET_NS),
    )
    link = made.links.between("away", "pd")
    link.why_down = None
    link.book.report(LinkReport(0, 1e12, 0))
    for i, (name, wait_s) in enumerate(waits_s.items()):
        stage = made.local if name in made.local.instances else made.remote_stages["away"]
        stage.book.dispatch(name, 100 + i, 0, round(wait_s * NS_PER_S))
    return made


def chosen(made: RouteFinder, num_prompt_tokens: int) -> str:
    """Name of the instance that prefills, by the threshold's path of 1,000 tokens."""
    path = Path.LOCAL if num_prompt_tokens <= 1000 else Path.REMOTE
    arrival = Arrival(1, num_prompt_tokens, num_prompt_tokens, {})
    option = made.apart(made.consider(arrival, 0).best, arrival, path, 0)
    candidate = option.local if path is Path.LOCAL else option.remote
    assert candidate is not None
    return candidate.name


LATE = {"p0": 12.0, "p1": 25.0, "r0": 28.0, "r1": 11.0}


@pytest.mark.parametrize(("tokens", "name"), [(500, "p1"), (3000, "r0")])
def test_what_is_late_anyway_joins_the_longest_queue_of_its_path(tokens: int, name: str) -> None:
    assert chosen(routes(LATE), tokens) == name


@pytest.mark.parametrize(("tokens", "name"), [(500, "p0"), (3000, "r1")])
def test_other_policies_spread_what_is_late(tokens: int, name: str) -> None:
    assert chosen(routes(LATE, PolicyName.PAPER), tokens) == name


def test_what_can_be_in_time_takes_the_shortest_queue() -> None:
    assert chosen(routes({**LATE, "p0": 2.0}), 500) == "p0"
    assert chosen(routes({**LATE, "r1": 2.0}), 3000) == "r1"


def test_what_only_the_link_delays_stays_in_the_shortest_queue() -> None:
    made = routes({"p0": 12.0, "p1": 30.0, "r0": 4.0, "r1": 1.0})
    made.links.between("away", "pd").book.report(LinkReport(0, 1e3, 0))
    assert chosen(made, 3000) == "r1"


def test_a_barred_path_is_no_way_out() -> None:
    made = routes({"p0": 12.0, "p1": 30.0, "r0": 0.0, "r1": 0.0})
    assert chosen(made, 500) == "p0"
    made.links.between("away", "pd").why_down = Reason.LINK_DOWN
    assert chosen(made, 500) == "p1"


@pytest.mark.parametrize(("tokens", "name"), [(500, "p0"), (3000, "r1")])
def test_nobody_is_sent_to_a_queue_of_more_than_three_targets(tokens: int, name: str) -> None:
    assert chosen(routes({"p0": 12.0, "p1": 31.0, "r0": 31.0, "r1": 11.0}), tokens) == name


def test_an_instance_that_is_not_ready_takes_nobody() -> None:
    made = routes({**LATE, "p1": 60.0})
    made.local.book.set_ready("p1", ready=False, now_ns=0)
    assert chosen(made, 500) == "p0"


@given(
    tokens=st.integers(1, 100_000),
    local_ns=st.integers(0, 10**11),
    remote_ns=st.integers(0, 10**11),
)
def test_a_path_without_headroom_takes_nobody_elses_requests(
    tokens: int, local_ns: int, remote_ns: int
) -> None:
    settings = AdaptiveSettings(ttft_max_ns=TARGET_NS)
    decision = AdaptivePolicy(10_000, settings).decide(
        RoutingFacts(tokens), Prediction(local_ns, remote_ns)
    )
    if decision.reason in (Reason.FASTER_LOCAL, Reason.FASTER_REMOTE):
        taken = local_ns if decision.path is Path.LOCAL else remote_ns
        left = remote_ns if decision.path is Path.LOCAL else local_ns
        is_lost = left > settings.lost_ratio * TARGET_NS
        assert (
            taken <= settings.headroom_ratio * TARGET_NS or min(taken, left) > TARGET_NS or is_lost
        )


@pytest.mark.parametrize(("local_s", "path"), [(25, Path.LOCAL), (300, Path.REMOTE)])
def test_who_is_lost_at_home_takes_the_last_headroom_away(local_s: int, path: Path) -> None:
    policy = AdaptivePolicy(10_000, AdaptiveSettings(ttft_max_ns=TARGET_NS))
    found = Prediction(local_s * NS_PER_S, round(0.95 * TARGET_NS))
    assert policy.decide(RoutingFacts(9_000), found).path is path


@pytest.mark.parametrize("local_is_less_late", [True, False])
def test_where_both_paths_are_late_the_less_late_one_is_taken(local_is_less_late: bool) -> None:
    policy = AdaptivePolicy(10_000, AdaptiveSettings(ttft_max_ns=TARGET_NS))
    late = 15 * NS_PER_S, 60 * NS_PER_S
    local_ns, remote_ns = late if local_is_less_late else late[::-1]
    for tokens in (9_000, 11_000):
        decision = policy.decide(RoutingFacts(tokens), Prediction(local_ns, remote_ns))
        assert (decision.path is Path.LOCAL) == local_is_less_late


@pytest.mark.parametrize(("backlog_s", "is_full"), [(9, False), (11, True)])
def test_a_link_is_promised_no_more_than_it_drains_within_the_target(
    backlog_s: int, is_full: bool
) -> None:
    made = routes({}, PolicyName.REMOTE)
    link = made.links.between("away", "pd")
    link.book.report(LinkReport(0, 8e6, 0))
    link.book.promise(backlog_s * 10**6, 0)
    option = made.consider(Arrival(1, 3000, 3000, {}), 0).best
    assert option.facts.obstacle is (Reason.LINK_FULL if is_full else None)


def test_bytes_that_wait_for_prefill_do_not_fill_the_link() -> None:
    made = routes({"r0": 60.0, "r1": 60.0}, PolicyName.REMOTE)
    link = made.links.between("away", "pd")
    link.book.report(LinkReport(0, 8e6, 0))
    link.book.promise(65 * 10**6, 0)
    assert made.consider(Arrival(1, 3000, 3000, {}), 0).best.facts.obstacle is None
