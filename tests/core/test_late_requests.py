"""What happens to requests that are late wherever they go."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch import (
    Arrival,
    DispatchSettings,
    HomeCluster,
    Member,
    Refused,
    RemoteCluster,
    Routed,
)
from prfaas.core.dispatcher import Dispatcher
from prfaas.core.link_book import LinkReport
from prfaas.core.policies import AdaptivePolicy, AdaptiveSettings, PolicyName
from prfaas.core.predictions import Prediction
from prfaas.core.routing import Path, Reason, RoutingFacts
from prfaas.units import NS_PER_S
from tests.sim.systems import linear_costs

TARGET_NS = 10 * NS_PER_S
COSTS = linear_costs()
"""1 ms a token on either side."""


def dispatcher(
    waits_s: Mapping[str, float],
    policy: PolicyName = PolicyName.ADAPTIVE,
    *,
    admission: bool = False,
) -> Dispatcher:
    """Two instances on either side with given queues, and a fast link."""
    made = Dispatcher(
        HomeCluster("pd", (Member("p0", "pd"), Member("p1", "pd")), (Member("d0", "pd"),), COSTS),
        [RemoteCluster("away", (Member("r0", "away"), Member("r1", "away")), COSTS)],
        DispatchSettings(policy, 1000, ttft_max_ns=TARGET_NS, admission=admission),
    )
    made.set_link("away", "pd", up=True)
    made.report_link("away", "pd", LinkReport(0, 1e12, 0, 0.0, 0))
    for name, wait_s in waits_s.items():
        made.report_load(name, 0, round(wait_s * NS_PER_S))
    return made


def routed(made: Dispatcher, num_prompt_tokens: int) -> Routed:
    found = made.arrive(Arrival(1, num_prompt_tokens, num_prompt_tokens, {}), 0)
    assert isinstance(found, Routed)
    return found


LATE = {"p0": 12, "p1": 30, "r0": 40, "r1": 11}


@pytest.mark.parametrize(("tokens", "name"), [(500, "p1"), (3000, "r0")])
def test_what_is_late_anyway_joins_the_longest_queue_of_its_path(tokens: int, name: str) -> None:
    assert routed(dispatcher(LATE), tokens).prefill == name


@pytest.mark.parametrize(("tokens", "name"), [(500, "p0"), (3000, "r1")])
def test_other_policies_spread_what_is_late(tokens: int, name: str) -> None:
    assert routed(dispatcher(LATE, PolicyName.PAPER), tokens).prefill == name


def test_what_can_be_in_time_takes_the_shortest_queue() -> None:
    assert routed(dispatcher({**LATE, "p0": 2}), 500).prefill == "p0"
    assert routed(dispatcher({**LATE, "r1": 2}), 3000).prefill == "r1"


def test_what_only_the_link_delays_stays_in_the_shortest_queue() -> None:
    made = dispatcher({"p0": 12, "p1": 30, "r0": 4, "r1": 1})
    made.report_link("away", "pd", LinkReport(0, 1e3, 0, 0.0, 0))
    assert routed(made, 3000).prefill == "r1"


def test_an_instance_that_is_not_ready_is_no_lane() -> None:
    made = dispatcher({**LATE, "p1": 60})
    made.set_ready("p1", ready=False)
    assert routed(made, 500).prefill == "p0"


def test_with_admission_they_are_refused_instead() -> None:
    made = dispatcher(LATE, admission=True)
    assert isinstance(made.arrive(Arrival(1, 500, 500, {}), 0), Refused)


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
        assert taken <= settings.headroom_ratio * TARGET_NS
