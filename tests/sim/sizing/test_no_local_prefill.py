"""A plan with N_p = 0: planner, confirmation, emission and scenario have one threshold, and a
prompt at or below it is served."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.report.json_report import deployment_settings, recommended
from prfaas.planner.workload import EmpiricalLengths
from prfaas.sim.scenario.scenario_file import ScenarioFile, ScenarioRoutingTable
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.sizing import trial_of, try_out
from prfaas.sim.workloads.make import WorkloadTable
from tests.planner.paths import EXAMPLES

SHORTEST = 8000
SHARES = {"whole": 1.0, "with hits": 0.7, "a third of a token": 1 / 3}


def question(share: float = 1.0) -> Question:
    """99 % of the prompts have the same length; nothing in the PD cluster prefills."""
    found = load_question(EXAMPLES / "paper-case-study.toml")
    problem = found.problem
    lengths = EmpiricalLengths((SHORTEST * share,) * 99 + (30_000.0 * share,))
    work = replace(problem.workload, lengths=lengths, mean_prompt_tokens=8220 * share)
    return replace(found, problem=replace(problem, workload=work, num_prefill=0))


@pytest.mark.parametrize("name", SHARES)
def test_planner_confirmation_emission_and_scenario_have_one_threshold(name: str) -> None:
    asked = question(SHARES[name])
    plan = make_plan(asked)
    found = plan.exact.prfaas.operation
    assert (found.num_prefill, found.offload_fraction) == (0, 1.0)
    emitted = tomllib.loads(deployment_settings(plan, recommended(plan)))
    file = ScenarioFile(
        title="x",
        plan="",
        workload=WorkloadTable(rate=1.0),
        routing=ScenarioRoutingTable(policy=PolicyName.PAPER),
    )
    setup, _ = make_setup(file, asked, 40_000)
    trial = trial_of(asked.problem, found, 1.0, 100, 1)
    threshold = emitted["routing"]["offload_threshold"]
    assert threshold < SHORTEST * SHARES[name]
    assert threshold == setup.routing.offload_threshold == trial.offload_threshold
    assert threshold == found.whole_threshold


@pytest.mark.parametrize("threshold", [0, SHORTEST - 1, SHORTEST, 40_000])
def test_a_prompt_at_or_below_the_threshold_is_served_where_it_can_be(threshold: int) -> None:
    problem = question().problem
    found = make_plan(question()).exact.prfaas.operation
    trial = trial_of(problem, found, found.rate_per_s / 2, 600, 1)
    figures = try_out(replace(trial, offload_threshold=threshold))
    assert figures.num_unserved == 0
    assert figures.offloaded_ratio == 1.0


def test_nothing_offloaded_has_a_threshold_that_no_prompt_exceeds(tmp_path: Path) -> None:
    asked = question(0.55551)
    lengths = asked.problem.workload.lengths
    problem = replace(asked.problem, num_prefill=None, threshold=lengths.high)
    plan = make_plan(replace(asked, problem=problem))
    emitted = tomllib.loads(deployment_settings(plan, recommended(plan)))
    assert emitted["routing"]["offload_threshold"] >= lengths.high
