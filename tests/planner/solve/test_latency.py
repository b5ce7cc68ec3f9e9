from __future__ import annotations

from dataclasses import replace
from math import factorial, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.problem import Problem
from prfaas.planner.solve import latency
from prfaas.planner.solve.latency import TransferOverlap, erlang_c, queued_ttft, service_ttft
from prfaas.planner.solve.search import OperatingPoint, optimum
from prfaas.planner.solve.sensitivity import with_bandwidth
from prfaas.planner.solve.throughput import StageMode
from tests.planner.queue_simulation import waits


@given(st.integers(1, 30), st.floats(0.01, 0.99))
def test_erlang_c_equals_its_definition(num_servers: int, utilisation: float) -> None:
    offered = num_servers * utilisation
    last = offered**num_servers / factorial(num_servers) / (1 - utilisation)
    others = sum(offered**n / factorial(n) for n in range(num_servers))
    assert erlang_c(num_servers, offered) == pytest.approx(last / (others + last), rel=1e-9)


def test_an_idle_system_waits_for_service_only(case_study: Question) -> None:
    problem = case_study.problem
    found = optimum(problem, StageMode.EXACT)
    service = service_ttft(problem, found, TransferOverlap.OVERLAPPED)
    idle = queued_ttft(problem, found, 1e-6)
    assert idle.mean == pytest.approx(service.mean, rel=1e-4)
    assert idle.p90 == pytest.approx(service.p90, rel=1e-4)


def test_waiting_grows_with_load_until_saturation(case_study: Question) -> None:
    problem = case_study.problem
    found = optimum(problem, StageMode.EXACT)
    loads = [0.3, 0.6, 0.9, 0.98]
    p99 = [queued_ttft(problem, found, x * found.rate_per_s).p99 for x in loads]
    assert p99 == sorted(p99)
    assert queued_ttft(problem, found, found.rate_per_s * 1.01).mean == inf


def test_bursty_arrivals_wait_longer(case_study: Question) -> None:
    problem = case_study.problem
    found = optimum(problem, StageMode.EXACT)
    bursty = replace(problem, workload=replace(problem.workload, arrival_cv=3.0))
    rate = 0.7 * found.rate_per_s
    assert queued_ttft(bursty, found, rate).mean > queued_ttft(problem, found, rate).mean


def test_overlap_hides_the_transfer_and_never_slows(case_study: Question) -> None:
    problem = case_study.problem
    found = optimum(problem, StageMode.EXACT)
    whole = service_ttft(problem, found)
    overlapped = service_ttft(problem, found, TransferOverlap.OVERLAPPED, chunk_tokens=1024)
    infinite = service_ttft(with_bandwidth(problem, 1e9), found)
    assert infinite.mean < overlapped.mean < whole.mean


def test_a_slow_link_is_not_hidden(case_study: Question) -> None:
    problem = with_bandwidth(case_study.problem, 1 / 100)
    found = optimum(problem, StageMode.EXACT)
    whole = service_ttft(problem, found)
    overlapped = service_ttft(problem, found, TransferOverlap.OVERLAPPED)
    assert overlapped.mean > 0.5 * whole.mean


def test_the_round_trip_is_counted_for_offloaded_requests(case_study: Question) -> None:
    problem = case_study.problem
    cluster = problem.prfaas[0]
    found = optimum(problem, StageMode.EXACT)
    # What TCP carries at that distance is another matter: see test_distance.py.
    link = replace(cluster.link.measured(cluster.goodput_bits_per_s), rtt_s=0.1)
    far = problem.with_cluster(0, replace(cluster, link=link))
    near_mean = service_ttft(problem, found, TransferOverlap.OVERLAPPED).mean
    far_mean = service_ttft(far, found, TransferOverlap.OVERLAPPED).mean
    assert far_mean - near_mean == pytest.approx(0.1 * found.offload_fraction, rel=0.01)


def test_a_rate_of_nothing_is_an_error(case_study: Question) -> None:
    found = optimum(case_study.problem, StageMode.EXACT)
    with pytest.raises(ConfigError, match="arrival rate is 0"):
        queued_ttft(case_study.problem, found, 0)


def _simulated(
    problem: Problem, found: OperatingPoint, rate_per_s: float
) -> tuple[float, float, float]:
    """Mean, P90 and P99 TTFT of 300,000 requests with Poisson arrivals on an infinite link."""
    rng, count = np.random.default_rng(1), 300_000
    lengths = rng.choice(problem.workload.lengths.sample()[0], count)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    assert found.offload_threshold is not None
    remote = lengths > found.offload_threshold
    ttft = np.empty(count)
    for mask, profile, servers in (
        (remote, problem.prfaas[0].prefill, found.num_prfaas),
        (~remote, problem.pd.prefill, found.num_prefill),
    ):
        service = profile.at(lengths[mask])
        ttft[mask] = service + waits(arrivals[mask], service, servers)
    p90, p99 = np.quantile(ttft, [0.9, 0.99])
    return float(ttft.mean()), float(p90), float(p99)


@pytest.mark.parametrize("load", [0.5, 0.7, 0.8])
def test_the_approximation_is_near_a_simulation(case_study: Question, load: float) -> None:
    problem = with_bandwidth(case_study.problem, 1e9)
    found = optimum(problem, StageMode.EXACT)
    rate = load * found.rate_per_s
    mean, p90, p99 = _simulated(problem, found, rate)
    queued = queued_ttft(problem, found, rate)
    assert queued.mean == pytest.approx(mean, rel=0.05)
    assert queued.p90 == pytest.approx(p90, rel=0.05)
    assert queued.p99 == pytest.approx(p99, rel=0.08)


@pytest.mark.parametrize("room", [0.0, 1e-16, 1e-12])
def test_a_stage_without_room_is_saturated_and_divides_nothing(room: float) -> None:
    # Rounding left one server with a load just below 1, and no spare rate: ZeroDivisionError.
    group = latency._Class(np.array([1.0]), np.array([49.0]), np.array([1.0]), 1)
    rate = (1 - room) / 49
    assert latency._wait(group, rate, 1.0) == (1.0, float("inf"))
    assert latency._wait(group, rate * 0.999, 1.0)[1] < float("inf")
