"""`prfaas plan --confirm`: the answer is simulated, and the exit code says whether it holds."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.agreement.carried import carried
from prfaas.cli.plan import plan_confirm
from prfaas.cli.plan.plan_command import plan
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.sizing import fleet as fleet_sizes
from prfaas.planner.sizing.fleet import size
from prfaas.planner.solve.search import optimum
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.sizing import Figures, Trial

from .paths import EXAMPLES

CASE = EXAMPLES / "paper-case-study.toml"


def as_planned(trial: Trial) -> Figures:
    """The planner's figures of a trial, in place of a simulation."""
    kept = replace(trial.problem, threshold=trial.offload_threshold, num_prefill=trial.num_prefill)
    rate = carried(kept, optimum(kept, StageMode.EXACT), trial.rate_per_s)
    return Figures(
        16_000, trial.rate_per_s, rate, 0.0, 0.0, 0.0, 5.0 + 0.1 * trial.seed, 9.0, 0.02, 0
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations are replaced by the planner's own figures."""
    monkeypatch.setattr(plan_confirm, "try_out", as_planned)


def run(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(
        plan, [str(CASE), "--confirm", "--seeds", "3", "--jobs", "1", *words]
    )
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout


def with_settings(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.usefixtures("planned")
def test_a_size_that_holds_is_confirmed_and_one_instance_less_is_not_enough() -> None:
    code, text = run(*with_settings("workload.arrival_rate=2"), "--json")
    found = json.loads(text)["confirmation"]
    assert code == 0
    assert found["confirmed"]
    names = [fleet["name"] for fleet in found["fleets"]]
    assert names == [
        "cheapest",
        "one less in H20 cluster",
        "one less in H200 cluster",
        "as in the file",
    ]
    by_name = {fleet["name"]: fleet for fleet in found["fleets"]}
    for name in names[1:3]:
        assert not by_name[name]["planner_holds"]
        assert by_name[name]["finding"] == "does not hold"
        assert f"{name} is not enough" in found["sentence"]
        assert by_name[name]["price_per_h"] < by_name["cheapest"]["price_per_h"]


@pytest.mark.usefixtures("planned")
def test_a_size_that_does_not_hold_is_said_with_its_figure_and_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The planner is made to answer with a fleet for half of the demand.
    def halved(problem: object, demand_per_s: float) -> object:
        return size(problem, demand_per_s / 2)  # type: ignore[arg-type]

    monkeypatch.setattr("prfaas.planner.answer.plan.size", halved)
    code, text = run(*with_settings("workload.arrival_rate=4", "prfaas.0.instances=6"))
    said = " ".join(text.split())
    assert code == 1
    assert "The simulator does not confirm it: with" in said
    assert "of the arrivals are carried, so queues grow" in said
    assert "an hour holds; the time to first token is not judged" in said


@pytest.mark.usefixtures("planned")
def test_without_a_demand_the_fleet_of_the_file_is_simulated_near_what_it_sustains() -> None:
    code, text = run("--json")
    found = json.loads(text)["confirmation"]
    assert code == 0
    assert [fleet["name"] for fleet in found["fleets"]] == ["as in the file"]
    assert found["demand_per_s"] == pytest.approx(0.95 * 3.181, rel=1e-3)


@pytest.mark.usefixtures("planned")
def test_without_a_target_the_time_to_first_token_is_not_confirmed() -> None:
    _, text = run()
    said = " ".join(text.split())
    assert "carries 3.022 req/s; the time to first token is not judged" in said
    assert "TTFT P90 of" not in said.partition("The simulator confirms it")[2]
    _, text = run(*with_settings('slo.ttft_p90="12s"'))
    assert "carries 3.125 req/s with a TTFT P90 of 5.2 ± 0.25 s" in " ".join(text.split())


@pytest.mark.usefixtures("planned")
def test_the_policy_that_is_simulated_is_named() -> None:
    _, text = run()
    assert 'Simulated with the policy "paper"' in " ".join(text.split())
    _, text = run("--json")
    assert "no admission" in json.loads(text)["confirmation"]["simulated_with"]


@pytest.mark.usefixtures("planned")
def test_the_settings_are_those_of_the_first_fleet_that_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halved(problem: object, demand_per_s: float) -> object:
        return size(problem, demand_per_s / 2)  # type: ignore[arg-type]

    monkeypatch.setattr("prfaas.planner.answer.plan.size", halved)
    code, text = run(*with_settings("workload.arrival_rate=4", "prfaas.0.instances=6"), "--emit")
    assert code == 1
    assert "# Fleet: the first that the simulator confirms, sized for 4.2 req/s" in text


def test_a_demand_that_no_fleet_carries_leaves_nothing_to_simulate() -> None:
    code, text = run(*with_settings("workload.arrival_rate=2", 'slo.ttft_p90="1s"'))
    assert code == 1
    assert "The planner has no fleet for this demand: there is nothing to simulate." in text


@pytest.mark.usefixtures("planned")
def test_the_settings_stay_toml_and_the_report_has_the_sentence(tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    code, text = run("--emit", "--report", str(report))
    assert code == 0
    assert tomllib.loads(text)["routing"]["offload_threshold"] > 0
    assert "The simulator confirms it: 4 in H200 cluster" in " ".join(report.read_text().split())


@pytest.mark.timeout(240)
def test_an_answer_is_simulated_in_processes_of_its_own() -> None:
    made = make_plan(load_question(CASE))
    # A third of what the fleet sustains: no queue grows, whatever the seed.
    found = plan_confirm.confirm(made, 2, num_requests=300, no_demand_ratio=0.3)
    assert plan_confirm.as_dict(found)["num_requests"] == 300
    report = found.fleets[0].report
    assert 2 < report.ttft_p90_s.mean < 6
    assert report.tpot_s.mean == pytest.approx(0.025, rel=1e-3)
    assert report.unserved_ratio == 0


def test_fleets_for_larger_demands_are_tried_once_each() -> None:
    problem = load_question(CASE).problem
    found = fleet_sizes.larger(problem, 2.0)
    sizes = [(c.problem.prfaas[0].num_instances, c.problem.pd.num_instances) for c in found]
    assert len(set(sizes)) == len(sizes) > 1


def test_neighbours_of_a_large_fleet_try_fewer_thresholds() -> None:
    question = load_question(CASE)
    fleet = size(question.problem, 100.0).cheapest
    assert fleet is not None
    for candidate in fleet_sizes.one_less(question.problem, fleet, 100.0):
        lengths, count = candidate.problem.workload.lengths, candidate.problem.pd.num_instances
        points = (lengths.high - lengths.low) / candidate.problem.step_tokens * count
        assert points <= fleet_sizes.POINTS_MAX
        assert candidate.found.rate_per_s > 95
