"""`prfaas simulate` as an operator sees it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from prfaas.cli.main import cli
from prfaas.cli.plan.simulate_command import simulate
from prfaas.errors import ConfigError
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
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


def test_the_bound_is_printed_beside_the_goodput() -> None:
    file, short = str(EXAMPLES / "paper-poisson.toml"), 'workload.duration="2min"'
    words = [file, "--set", short, "--set", 'workload.warmup="0s"', "--bound"]
    text = CliRunner().invoke(simulate, words)
    assert text.exit_code == 0, text.output
    assert "offline bound of the goodput" in text.output
    said = json.loads(CliRunner().invoke(simulate, [*words, "--json"]).stdout)
    assert said["runs"]["adaptive"]["goodput"] <= said["goodput_bound"]
    assert "ttft_ms" not in said["runs"]["adaptive"]
    two = CliRunner().invoke(simulate, [*words, "--seeds", "2"])
    assert two.exit_code == 2
    without = CliRunner().invoke(simulate, [str(EXAMPLES / "four-clusters.toml"), "--bound"])
    assert without.exit_code == 1
    assert "one PrfaaS cluster" in str(without.exception)


def test_a_run_in_which_nothing_is_in_time_says_so() -> None:
    file, short = str(EXAMPLES / "paper-poisson.toml"), 'workload.duration="2min"'
    words = [file, "--set", short, "--set", 'workload.warmup="0s"', "--set", 'slo.ttft="1ms"']
    made = CliRunner().invoke(simulate, [*words, "--json"])
    assert "none of" in made.stderr
    assert "finished" in json.loads(made.stdout)["warnings"]["adaptive"]
    late = CliRunner().invoke(simulate, [*words, "--set", "routing.admission=false"])
    assert "met its targets" in late.stderr


def test_a_wrong_profile_of_the_gateway_is_a_key() -> None:
    settings = ['workload.duration="4min"', 'workload.warmup="0s"', "workload.rate=1.0"]
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml", settings)
    right = run(scenario).results
    wrong = load_scenario(
        EXAMPLES / "paper-poisson.toml", [*settings, "routing.planned_remote_ratio=20"]
    )
    found = run(wrong).results
    assert found.offloaded_ratio < right.offloaded_ratio / 2
