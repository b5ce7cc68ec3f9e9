"""`prfaas simulate` as an operator sees it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import cli
from prfaas.errors import ConfigError
from tests.sim.systems import EXAMPLES

PAPER = str(EXAMPLES / "paper-poisson.toml")
SHORT = ["--set", 'workload.duration="4min"', "--set", 'workload.warmup="0s"']


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments])


def test_policies_side_by_side() -> None:
    result = call(PAPER, *SHORT, "--policy", "paper", "--policy", "adaptive")
    assert result.exit_code == 0, result.output
    for word in ("paper", "adaptive", "goodput", "TTFT P90", "digest", "threshold 19,600"):
        assert word in result.output


def test_json_and_seed() -> None:
    outputs = [call(PAPER, *SHORT, "--json", "--seed", seed).stdout for seed in ("3", "3", "4")]
    first, again, other = (json.loads(output) for output in outputs)
    assert first == again
    assert first["seed"] == 3
    digests = [found["runs"]["adaptive"]["digest"] for found in (first, other)]
    assert digests[0] != digests[1]


def test_sweep() -> None:
    result = call(PAPER, *SHORT, "--sweep", "--policy", "remote", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["rate_per_s"]["remote"] > 1.0


def test_an_unknown_key_names_the_nearest() -> None:
    result = call(PAPER, "--set", "link.bandwith=5Gbps")
    assert isinstance(result.exception, ConfigError)
    assert "nearest valid one is 'bandwidth'" in str(result.exception)


def test_a_warmup_that_leaves_nothing_to_count_is_said() -> None:
    result = call(PAPER, "--set", "workload.duration=4min", "--set", "workload.warmup=4min")
    assert isinstance(result.exception, ConfigError)
    assert "warmup is 240 s and duration 240 s" in str(result.exception)


@pytest.mark.parametrize(
    ("file", "what"),
    [("laptop.toml", "a deployment file"), ("plan/paper-case-study.toml", "a plan file")],
)
def test_another_kind_of_file_is_named(file: str, what: str) -> None:
    result = call(str(EXAMPLES.parent / file))
    assert isinstance(result.exception, ConfigError)
    assert f"{file} is {what}" in str(result.exception)
