"""Questions at the edge of what the planner takes: nothing, one of something, a fixed setting."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from prfaas.cli.plan.plan_command import plan
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.problem import Problem
from prfaas.planner.solve import designs, latency
from prfaas.planner.solve.latency import queued_ttft
from prfaas.planner.solve.search import optimum
from prfaas.planner.solve.sensitivity import with_bandwidth
from prfaas.planner.solve.throughput import StageMode
from prfaas.planner.workload import LogNormalLengths
from prfaas.sim.scenario.scenario_file import ScenarioFile
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.toml_tables import read_toml, validated
from tests.planner.paths import EXAMPLES
from tests.planner.queue_simulation import waits

CASE = EXAMPLES / "paper-case-study.toml"


def test_a_plan_without_prfaas_instances_is_printed_as_json() -> None:
    result = CliRunner().invoke(plan, [str(CASE), "--json", "--set", "prfaas.0.instances=0"])
    assert result.exit_code == 0, result.exception
    found = {d["name"]: d for d in json.loads(result.output)["exact"]["designs"]}
    assert found["naive heterogeneous"]["slack"]["PrfaaS prefill"] == 0
    assert found["naive heterogeneous"]["price_per_mtoken"] is None


def test_a_dead_design_has_no_price() -> None:
    # 200 bit/s ship a request in a third of a year; its price was 36 million.
    problem = load_question(CASE, ['prfaas.0.link.bandwidth="200bps"']).problem
    naive = designs.naive_heterogeneous(problem, StageMode.EXACT)
    assert 0 < naive.operation.rate_per_s < designs.DEAD_PER_S
    assert naive.price_per_mtoken == float("inf")


@pytest.mark.parametrize("num_prefill", [1, 3, 6])
def test_a_plan_keeps_a_given_number_of_prefill_instances(num_prefill: int) -> None:
    question = load_question(CASE, [f"search.num_prefill={num_prefill}"])
    made = make_plan(question)
    ours = made.exact.prfaas.operation
    assert (ours.num_prefill, ours.num_decode) == (num_prefill, 8 - num_prefill)
    free = make_plan(load_question(CASE)).exact
    assert ours.rate_per_s <= free.prfaas.operation.rate_per_s
    # The baseline keeps its own best split.
    other = made.exact.equal_gpus.operation
    assert other.num_prefill == free.equal_gpus.operation.num_prefill


def test_a_number_of_prefill_instances_that_leaves_no_decode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"search\.num_prefill is 8; .* it is 0 to 7"):
        load_question(CASE, ["search.num_prefill=8"])


@pytest.mark.parametrize("as_json", [True, False])
def test_every_prompt_may_have_the_same_length(as_json: bool) -> None:
    settings = ['workload.distribution="lengths"', "workload.lengths=[20000]"]
    arguments = [w for s in settings for w in ("--set", s)]
    result = CliRunner().invoke(plan, [str(CASE), *arguments, *(["--json"] if as_json else [])])
    assert result.exit_code == 0, result.exception
    problem = load_question(CASE, settings).problem
    found = optimum(problem, StageMode.EXACT)
    assert found.rate_per_s == pytest.approx(optimum(problem, StageMode.PAPER).rate_per_s)
    # All offloaded or all local, whichever carries more.
    assert found.offload_fraction in {0.0, 1.0}


def test_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload\.lengths is empty"):
        load_question(CASE, ['workload.distribution="lengths"', "workload.lengths=[]"])


def _simulated_p99(problem: Problem, rate_per_s: float, seed: int) -> float:
    """P99 TTFT with gamma gaps between arrivals, at the optimum's settings, on a fast link."""
    found, rng, count = optimum(problem, StageMode.EXACT), np.random.default_rng(seed), 60_000
    shape = 1 / problem.workload.arrival_cv**2
    lengths = rng.choice(problem.workload.lengths.sample()[0], count)
    arrivals = np.cumsum(rng.gamma(shape, 1 / rate_per_s / shape, count))
    assert found.offload_threshold is not None
    remote = lengths > found.offload_threshold
    ttft = np.empty(count)
    for mask, profile, servers in (
        (remote, problem.prfaas[0].prefill, found.num_prfaas),
        (~remote, problem.pd.prefill, found.num_prefill),
    ):
        service = profile.at(lengths[mask])
        ttft[mask] = service + waits(arrivals[mask], service, servers)
    return float(np.quantile(ttft, 0.99))


@pytest.mark.parametrize("seed", range(8))
def test_the_p99_with_queueing_lies_in_the_range_that_is_printed(
    case_study: Question, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    workload = replace(
        case_study.problem.workload,
        lengths=LogNormalLengths(9.9, float(rng.uniform(0.4, 1.6)), 128, 131_072),
        arrival_cv=float(rng.uniform(1, 2)),
    )
    problem = replace(with_bandwidth(case_study.problem, 1e9), workload=workload)
    remote = replace(problem.prfaas[0], num_instances=int(rng.integers(1, 8)))
    problem = problem.with_cluster(0, remote)
    found = optimum(problem, StageMode.EXACT)
    rate = float(rng.uniform(0.5, 0.9)) * found.rate_per_s
    low, high = queued_ttft(problem, found, rate).p99_range
    assert low <= _simulated_p99(problem, rate, seed) <= high


def test_the_range_of_the_p99_is_printed_and_in_json() -> None:
    text = CliRunner().invoke(plan, [str(CASE), "--details"]).output
    assert "P99: range seen in simulation" in text
    found = json.loads(CliRunner().invoke(plan, [str(CASE), "--json"]).output)
    queued = found["latency"]["queued"]["PrfaaS-PD"]
    assert queued["p99_low"] == pytest.approx(queued["p99"] * latency.P99_RANGE[0])
    assert queued["p99_high"] == pytest.approx(queued["p99"] * latency.P99_RANGE[1])


@pytest.mark.parametrize(
    ("longest", "words"),
    [
        (36_280, "is continued below 1024 tokens along"),
        (200_000, "is continued below 1024 tokens and from 130000 to 200000 tokens along"),
    ],
)
def test_a_profile_is_continued_only_past_its_ends(longest: int, words: str) -> None:
    path = EXAMPLES.parent / "sim" / "bursty.toml"
    file = validated(ScenarioFile, read_toml(path), path)
    # It said "continued from 130000 to 36280 tokens".
    _, notes = make_setup(file, load_question(CASE, ["workload.max_tokens=20000"]), longest)
    assert words in notes[0]
