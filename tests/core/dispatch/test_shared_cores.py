"""Prompts stay local where a PrfaaS engine would compute them on the cores of the PD engine."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
)
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import PolicyName

LONG, SHORT = 1000, 10


def dispatcher(policy: PolicyName, *remote: ClusterMember) -> Dispatcher:
    """PD instances p0 and p1, and these remote ones; all are ready, links are up."""
    local = (ClusterMember("p0", "pd"), ClusterMember("p1", "pd"))
    made = Dispatcher(
        LocalCluster("pd", local),
        [RemoteCluster("far", remote)],
        DispatchSettings(policy, 100),
    )
    for member in (*local, *remote):
        made.describe(member.name, num_tokens_max=10**6, layout_id=b"")
        made.set_ready(member.name, ready=True, now_ns=0)
    for member in remote:
        made.set_link(member.pool, "pd", up=True)
    made.set_ready("p1", ready=False, now_ns=0)
    return made


def arrive(made: Dispatcher, num_tokens: int, number: int = 0) -> Routed:
    found = made.arrive(Arrival(number, num_tokens, 0), 0)
    assert isinstance(found, Routed)
    return found


ON_P0 = ClusterMember("r0", "far", frozenset({"p0"}))


def test_a_prompt_is_not_sent_to_an_engine_on_the_cores_of_the_pd_engine() -> None:
    made = dispatcher(PolicyName.OBSERVED, ON_P0)
    found = arrive(made, LONG).decision
    assert (found.path, found.reason) == (Path.LOCAL, Reason.SHARED_CORES)
    assert "on the cores of the PD engine" in found.explanation
    assert arrive(made, SHORT, 1).decision.reason is Reason.BELOW_THRESHOLD


@pytest.mark.parametrize("policy", [PolicyName.PAPER, PolicyName.REMOTE, PolicyName.ADAPTIVE])
def test_policies_that_an_operator_names_offload_all_the_same(policy: PolicyName) -> None:
    assert arrive(dispatcher(policy, ON_P0), LONG).decision.path is Path.REMOTE


@pytest.mark.parametrize("within", [frozenset[str](), frozenset({"p1"})])
def test_an_engine_with_cores_of_its_own_is_used(within: frozenset[str]) -> None:
    """Also one on the cores of another PD engine than the one that would prefill."""
    made = dispatcher(PolicyName.OBSERVED, ClusterMember("r0", "far", within))
    assert arrive(made, LONG).decision.path is Path.REMOTE


def test_engines_with_cores_of_their_own_are_found_behind_those_without() -> None:
    others = [ClusterMember(f"r{n}", "far", frozenset({"p0"})) for n in range(1, 300)]
    made = dispatcher(PolicyName.OBSERVED, ON_P0, *others, ClusterMember("own", "far"))
    found = arrive(made, LONG)
    assert (found.decision.path, found.prefill) == (Path.REMOTE, "own")


def test_an_engine_that_joins_counts_by_its_cores() -> None:
    made = dispatcher(PolicyName.OBSERVED, ON_P0)
    made.add("far", ClusterMember("own", "far"))
    made.describe("own", num_tokens_max=10**6, layout_id=b"")
    made.set_ready("own", ready=True, now_ns=0)
    assert arrive(made, LONG).prefill == "own"
