"""Regions of a scenario: the simulator excludes the clusters that a gateway excludes."""

from __future__ import annotations

import pytest

from prfaas.errors import ConfigError
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

SHORT = [
    "workload.rate=1",
    'workload.duration="3min"',
    'workload.warmup="10s"',
    "workload.tenants={limited=1, free=1}",
    'routing.policy="remote"',
]


def test_the_prompts_of_a_limited_tenant_stay_in_its_regions() -> None:
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml", SHORT)
    pd, far = scenario.setup.name, scenario.setup.prfaas[0].name
    regions = [
        f'residency.clusters={{"{pd}"=["eu"], "{far}"=["us"]}}',
        'residency.tenants={limited=["eu"]}',
    ]
    free = run(load_scenario(EXAMPLES / "paper-poisson.toml", SHORT)).results
    limited = run(load_scenario(EXAMPLES / "paper-poisson.toml", [*SHORT, *regions])).results
    assert limited.decisions["region"] > 0.2 * sum(limited.decisions.values())
    assert "region" not in free.decisions


def test_regions_of_an_unknown_cluster_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"residency.clusters: \['mars'\] are not clusters"):
        load_scenario(EXAMPLES / "paper-poisson.toml", [*SHORT, 'residency.clusters={mars=["x"]}'])
