"""Figures of a run: statistics, parts of TTFT, queues, time series."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.signals import NUM_SAMPLES_MAX
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.columns import PARTS, by_percentile, means, spread
from prfaas.sim.results.summary import Results, digest, summarise
from prfaas.sim.system.setup import Failure, FailureKind
from prfaas.units import NS_PER_S
from tests.sim.systems import requests_at, system


def test_statistics_are_those_of_numpy() -> None:
    values = [5.0, 1.0, 9.0, 3.0]
    found = spread(values)
    assert list(found) == ["avg", "min", "p50", "p75", "p90", "p95", "p99", "max", "std"]
    assert found["avg"] == 4.5
    assert (found["min"], found["p50"], found["max"]) == (1.0, 4.0, 9.0)
    assert found["std"] == pytest.approx(np.std(values))
    assert spread([]) == {}


def cut_run(num_samples_max: int = NUM_SAMPLES_MAX) -> tuple[Simulation, Results]:
    """Three requests over a link that is cut while the first is on it."""
    cut = Failure(FailureKind.LINK, at_ns=NS_PER_S, for_ns=60 * NS_PER_S)
    setup = replace(system(policy=PolicyName.REMOTE), failures=(cut,))
    requests = requests_at([0, 10 * NS_PER_S, 80 * NS_PER_S], [3000] * 3, 5)
    simulation = Simulation(setup, requests, num_samples_max=num_samples_max)
    simulation.run()
    return simulation, summarise(simulation, start_ns=0, end_ns=81 * NS_PER_S)


def test_the_parts_of_ttft_add_up_to_it_even_when_work_was_lost() -> None:
    _, results = cut_run()
    assert tuple(results.ttft_parts) == PARTS
    assert sum(results.ttft_parts.values()) == pytest.approx(results.time_to_first_token["avg"])
    # The first request is given up 5 s after the cut at 1 s.
    assert results.ttft_parts["lost_attempts"] == pytest.approx(6000 / 3)


def test_ranges_of_percentiles_cover_every_request_once() -> None:
    parts = np.array([[0.0, float(i), 0.0, 0.0, 0.0] for i in range(200)])
    found = by_percentile(parts)
    queue = [found[name]["queue"] for name in ("p0-p50", "p50-p90", "p90-p99", "p99-p100")]
    assert queue == [49.5, 139.5, 188.5, 198.5]
    weights = (100, 80, 18, 2)
    total = sum(w * q for w, q in zip(weights, queue, strict=True)) / 200
    assert means(parts)["queue"] == pytest.approx(total)


def test_names_are_those_of_aiperf_and_counts_agree() -> None:
    simulation, results = cut_run()
    said = results.as_dict()
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert said[name]["min"] <= said[name]["p50"] <= said[name]["p99"] <= said[name]["max"]
    assert said["good_request_count"] == 3
    assert said["output_token_throughput"] == pytest.approx(15 / 81)
    assert said["input_sequence_length"]["avg"] == 3000
    assert said["output_sequence_length"]["max"] == 5
    assert said["num_recomputed"] == 1
    assert said["queues"]["pd_prefill_ms"]["max"] > 0
    assert simulation.num_open == 0


def test_looking_changes_nothing_and_stays_within_its_limit() -> None:
    often, _ = cut_run()
    seldom, _ = cut_run(num_samples_max=10)
    assert digest(often) == digest(seldom)
    assert len(seldom.series.samples) < 10 < len(often.series.samples)
    instants = [s.at_ns for s in seldom.series.samples]
    assert instants[0] == 0
    assert set(np.diff(instants).tolist()) == {16 * NS_PER_S}


def test_the_series_sees_queues_and_a_cut_link() -> None:
    simulation, _ = cut_run()
    by_second = {s.at_ns // NS_PER_S: s for s in simulation.series.samples}
    assert by_second[0].link_bits_per_s == 1e9
    assert by_second[5].link_bits_per_s == 0
    assert by_second[5].link_backlog_bytes == 3000 * 1000
    # The instance that decodes computes the prompt; the queue of those that prefill is empty.
    assert by_second[7].local_wait_ns == 0
    assert by_second[7].num_prfaas == 1
