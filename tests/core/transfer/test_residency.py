"""PrfaaS clusters outside a tenant's regions take no part in the decisions for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
)
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.core.transfer.residency import Residency
from tests.core.dispatching import MS, costs, sent

RESIDENCY = Residency(
    {"pd": frozenset({"eu"}), "near": frozenset({"eu"}), "far": frozenset({"us", "eu"})},
    {"limited": frozenset({"eu"}), "both": frozenset({"eu", "us"})},
)
LONG = Arrival(1, 20_000, 20_000, shippable_tokens=19_000)


def dispatcher(policy: PolicyName, *clusters: str, pulls: bool = False) -> Dispatcher:
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("h0", "home"),), None, costs()),
        [RemoteCluster(name, (ClusterMember(f"r-{name}", name),), costs()) for name in clusters],
        DispatchSettings(policy, 1000, pulls=pulls, residency=RESIDENCY),
    )
    for source in clusters:
        made.set_link(source, "home", up=True)
        made.links.report(source, "home", LinkReport(0, 1e10, 0, 0, MS))
    return made


@pytest.mark.parametrize("policy", [each for each in PolicyName if each is not PolicyName.LOCAL])
@pytest.mark.parametrize("tenant", ["limited", "both", "free"])
def test_a_tenant_is_offloaded_to_clusters_of_its_regions_alone(
    policy: PolicyName, tenant: str
) -> None:
    for _ in range(3):
        found = sent(dispatcher(policy, "far").arrive(LONG._replace(tenant=tenant), 0))
        expected = Path.LOCAL if tenant == "limited" else Path.REMOTE
        assert found.decision.path is expected
        if tenant == "limited":
            assert found.decision.reason is Reason.REGION
            assert not found.source


def test_a_cached_prefix_in_an_excluded_cluster_does_not_draw_a_request() -> None:
    hits = {"far": 18_000, "r-far": 18_000}
    both = LONG._replace(tenant="both", hits=hits)
    assert sent(dispatcher(PolicyName.REMOTE, "near", "far").arrive(both, 0)).cluster == "far"
    limited = both._replace(tenant="limited")
    assert sent(dispatcher(PolicyName.REMOTE, "near", "far").arrive(limited, 0)).cluster == "near"


def test_the_decision_names_the_region_of_every_excluded_candidate() -> None:
    made = dispatcher(PolicyName.REMOTE, "near", "far")
    options = made.consider(LONG._replace(tenant="limited"), 0).options
    assert {each.cluster.name: each.facts.obstacle for each in options} == {
        "near": None,
        "far": Reason.REGION,
    }


def test_no_prefix_is_pulled_or_copied_from_an_excluded_cluster() -> None:
    held = LONG._replace(hits={"far": 18_000}, num_prompt_tokens=19_000)
    made = dispatcher(PolicyName.ADAPTIVE, "far", pulls=True)
    made.replan(10**6)
    pulled = sent(made.arrive(held._replace(tenant="both"), 0))
    assert pulled.pulled_from == "far" or pulled.decision.path is Path.REMOTE
    again = held._replace(tenant="limited", request_id=2)
    considered = made.consider(again, 0)
    found = sent(made.decide(again, considered, 0))
    assert (found.decision.path, found.pulled_from, found.source) == (Path.LOCAL, "", "")
    assert not list(considered.missed(found))


def test_a_deployment_without_regions_decides_as_before() -> None:
    with_regions = dispatcher(PolicyName.ADAPTIVE, "near", "far")
    without = Dispatcher(
        LocalCluster("pd", (ClusterMember("h0", "home"),), None, costs()),
        [
            RemoteCluster(name, (ClusterMember(f"r-{name}", name),), costs())
            for name in ("near", "far")
        ],
        replace(with_regions._settings, residency=Residency()),
    )
    for source in ("near", "far"):
        without.set_link(source, "home", up=True)
        without.links.report(source, "home", LinkReport(0, 1e10, 0, 0, MS))
    for number in range(20):
        arrival = LONG._replace(
            request_id=number, tenant="free", num_prompt_tokens=500 * number + 1
        )
        assert with_regions.arrive(arrival, 0) == without.arrive(arrival, 0)
