"""Tables of all kinds of files: where a key lies, and what is valid there."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_file import PlanFile
from prfaas.sim.scenario.scenario_file import ScenarioFile
from prfaas.toml_tables import known_keys, validated


@pytest.mark.parametrize(
    ("model", "place", "key"),
    [
        (Deployment, ["routing"], "offload_threshold"),
        (Deployment, ["tracing"], "sample_ratio"),
        (Deployment, ["clusters", "anything"], "timing"),
        (Deployment, ["clusters", "anything", "timing"], "time_scale"),
        (Deployment, ["clusters", "anything", "pools", "some-pool"], "memory"),
        (Deployment, ["clusters", "anything", "pools", "some-pool", "links", "peer"], "budget"),
        (PlanFile, [], "workload"),
        (PlanFile, ["prfaas", 0], "gpus_per_instance"),
        (PlanFile, ["prfaas", 3, "link"], "bandwidth"),
        (ScenarioFile, ["workload"], "rate"),
    ],
)
def test_known_keys_follow_the_tables(
    model: type[BaseModel], place: list[str | int], key: str
) -> None:
    assert key in known_keys(model, place)


def test_there_are_no_keys_where_no_table_is() -> None:
    assert known_keys(Deployment, ["routing", "offload_threshold"]) == []


def test_a_misspelt_key_of_a_list_is_named_with_its_place(tmp_path: Path) -> None:
    tables = {"prfaas": [{"link": {"bandwith": "10Gbps"}}]}
    with pytest.raises(ConfigError, match=r"prfaas\.0\.link\.bandwith: unknown key; .*'bandwidth'"):
        validated(PlanFile, tables, tmp_path)
