"""The case study of arXiv:2604.15039: printed service times, and exact expectations."""

from __future__ import annotations

import pytest

from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from tests.sim.systems import EXAMPLES

PAPER = EXAMPLES / "paper-poisson.toml"
HYBRID = ["routing.policy=paper", "routing.prefill_instances=3", "routing.threshold=19400"]
NAIVE = ["routing.policy=remote", "routing.prefill_instances=0"]
HOMOGENEOUS = [
    "routing.policy=local",
    "routing.prefill_instances=9",
    'plan_settings=["pd.instances=12", "prfaas.0.instances=0"]',
]


def results(*settings: str, stop_at_s: int | None = None) -> Results:
    stop_at_ns = None if stop_at_s is None else stop_at_s * 10**9
    return run(load_scenario(PAPER, settings), stop_at_ns=stop_at_ns).results


# Table 6 prints service times without queueing; the transfer follows prefill in them.
# A minute between observations: at no load there is nothing to see.
LOW_LOAD = [
    "workload.rate=0.01",
    'workload.duration="1000h"',
    "link.overlap=false",
    'signals.interval="1min"',
    'signals.loop_interval="10min"',
]


@pytest.mark.parametrize(
    ("design", "mean_s", "p90_s"),
    [(HYBRID, 2.22, 3.51), (HOMOGENEOUS, 4.44, 9.73), (NAIVE, 1.74, 3.51)],
    ids=["PrfaaS-PD", "homogeneous", "naive"],
)
def test_low_load_gives_the_ttft_of_table_6(design: list[str], mean_s: float, p90_s: float) -> None:
    found = results(*design, *LOW_LOAD).time_to_first_token
    assert found["avg"] / 1e3 == pytest.approx(mean_s, rel=0.02)
    assert found["p90"] / 1e3 == pytest.approx(p90_s, rel=0.02)


@pytest.mark.parametrize(
    ("hours", "within"), [(1, 0.03), pytest.param(4, 0.02, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    ("design", "rate_per_s"),
    [(HYBRID, 3.17), (HOMOGENEOUS, 2.02), (NAIVE, 2.39)],
    ids=["PrfaaS-PD", "homogeneous", "naive"],
)
def test_overload_saturates_at_the_exact_expectation(
    design: list[str], rate_per_s: float, hours: int, within: float
) -> None:
    load = [
        f"workload.rate={rate_per_s * 1.3}",
        f'workload.duration="{hours}h"',
        'workload.warmup="10min"',
        # Refusing the longest would serve more requests than the paper's system does.
        "routing.admission=false",
    ]
    found = results(*design, *load, stop_at_s=hours * 3600)
    assert found.request_throughput == pytest.approx(rate_per_s, rel=within)
