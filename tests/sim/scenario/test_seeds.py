"""Intervals over seeds, and the command that prints them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from prfaas.cli.plan.simulate_command import simulate
from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.scenario.run import interval, percentile_interval, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

SETTINGS = ('workload.duration="4min"', 'workload.warmup="0s"')


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    # t(0.975, 2) is 4.303, the deviation 1, over the root of 3.
    assert found.half_width == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert interval([1.0]).half_width is None


@pytest.mark.parametrize("num_seeds", [5, 20])
def test_the_interval_of_a_percentile_covers_that_of_all_requests(num_seeds: int) -> None:
    """Bursts make whole runs slow: their lengths differ by a factor. The mean of the percentiles of
    single runs, with Student's interval, covers the percentile of all requests less often."""
    chance = np.random.default_rng(7)

    def sample(runs: int) -> list[FloatArray]:
        factors = np.exp(chance.normal(0, 0.5, (runs, 1)))
        return list(np.asarray(factors * np.exp(chance.normal(0, 0.6, (runs, 400)))))

    truth = float(np.percentile(np.concatenate(sample(2000)), 99))
    covered, covered_by_means = 0, 0
    for _ in range(200):
        runs = sample(num_seeds)
        found = percentile_interval(runs, 99)
        means = interval([float(np.percentile(run, 99)) for run in runs])
        assert found.half_width is not None
        assert means.half_width is not None
        covered += abs(found.mean - truth) <= found.half_width
        covered_by_means += abs(means.mean - truth) <= means.half_width
    assert covered / 200 >= 0.88
    assert covered_by_means / 200 < 0.75


def test_runs_without_values_are_left_out() -> None:
    assert np.isnan(percentile_interval([np.zeros(0)], 99).mean)
    one = percentile_interval([np.zeros(0), np.arange(1.0, 101.0, dtype=np.float64)], 50)
    assert (one.mean, one.half_width) == (50.5, None)


@pytest.mark.timeout(180)
def test_seeds_run_in_parallel_and_give_the_mean_of_single_runs() -> None:
    file = EXAMPLES / "paper-poisson.toml"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    made = CliRunner().invoke(
        simulate, [str(file), *words, "--seed", "4", "--seeds", "2", "--json"]
    )
    assert made.exit_code == 0, made.output
    said = json.loads(made.stdout)
    assert said["seeds"] == [4, 5]
    alone = [run(load_scenario(file, SETTINGS).with_seed(seed)).results for seed in (4, 5)]
    found = said["intervals"]["adaptive"]
    assert found["goodput"]["mean"] == pytest.approx(sum(r.goodput for r in alone) / 2)
    longest = sum(r.time_to_first_token["max"] for r in alone) / 2 / 1e3
    assert found["ttft_max"]["mean"] == pytest.approx(longest)


def test_seeds_and_a_report_of_one_run_exclude_each_other() -> None:
    made = CliRunner().invoke(
        simulate, [str(EXAMPLES / "bursty.toml"), "--seeds", "2", "--report", "x.html"]
    )
    assert made.exit_code == 2
    assert "--seeds makes many runs" in made.output
