"""Simulations that check the planner's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from prfaas.core.routing.policies import PolicyName
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.hardware.profiles import PrefillProfile, StepTime
from prfaas.planner.model.kv_geometry import FloatArray, kv_bytes_at
from prfaas.planner.problem import Problem
from prfaas.planner.solve.search import OperatingPoint
from prfaas.planner.solve.throughput import decode_batch
from prfaas.sim.results.columns import columns_of
from prfaas.sim.scenario.run import Interval, ScenarioRun, interval, percentile_interval, run
from prfaas.sim.scenario.scenario_file import ScenarioFile, ScenarioRoutingTable
from prfaas.sim.scenario.scenario_loader import Scenario
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.system.request import UNSET
from prfaas.sim.system.setup import Setup, SignalSetup
from prfaas.sim.workloads.make import ScaledWorkload, WorkloadTable
from prfaas.sim.workloads.requests import Synthetic
from prfaas.units import NS_PER_S

SIMULATED_WITH = 'the policy "paper" with the threshold of the plan, no admission'
"""Routing of every trial. A trial that offloads nothing has the policy "local"."""
WARMUP_SHARE = 0.25
"""Requests before the measured ones, as a share of these: queues fill meanwhile."""
_CV_MIN = 0.01  # of the gaps; evenly spaced arrivals are the limit
_OBSERVATIONS_PER_S = 2.0  # of queues, at most
_OBSERVATIONS_PER_REQUEST = 0.2  # of queues, at most: a slow fleet takes hours of virtual time
_DECODES_MIN = 3.0  # time of a decode that the warm-up lasts at least


@dataclass(frozen=True)
class Trial:
    """A fleet with its settings, and the load that it is given."""

    problem: Problem
    """The question, with the fleet's numbers of instances."""
    num_prefill: int
    offload_threshold: int | None
    """t, tokens; None offloads nothing."""
    rate_per_s: float
    """Arrival rate, req/s."""
    num_requests: int
    """Measured requests; those of the warm-up come before them."""
    seed: int
    to_the_end: bool = True
    """Run until every request has ended; otherwise stop with the arrivals."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run over its measured time."""

    num_arrived: int
    arrived_per_s: float
    """Rate of the same, req/s."""
    carried_per_s: float
    """Requests that got their first token, req/s."""
    local_per_s: float
    """Those of them that were prefilled in the PD cluster, req/s."""
    remote_per_s: float
    """Those of them that were prefilled in a PrfaaS cluster, req/s."""
    offloaded_ratio: float
    """Share of the arrivals that were sent to a PrfaaS cluster."""
    ttft_p90_s: float
    """90th percentile of the time to first token of arrivals that finished, s."""
    ttft_p99_s: float
    """99th percentile of the same, s."""
    tpot_s: float
    """Mean time per output token after the first, s; 0 without any."""
    num_unserved: int
    """Arrivals that failed or were refused."""
    ttft_s: FloatArray = field(default_factory=lambda: np.zeros(0), compare=False, repr=False)
    """Times to first token of arrivals that finished, s."""


def trial_of(
    problem: Problem, found: OperatingPoint, rate_per_s: float, num_requests: int, seed: int
) -> Trial:
    """Return the trial of a plan's settings, run to the end."""
    threshold = found.whole_threshold if found.offload_fraction > 0 else None
    if threshold is None and found.offload_fraction > 0:
        threshold = 0  # everything is offloaded, whatever its length
    return Trial(problem, found.num_prefill, threshold, rate_per_s, num_requests, seed)


def try_out(trial: Trial) -> Figures:
    """Simulate a trial.

    Raises:
        ConfigError: The fleet cannot be simulated, for instance because prompts are too long.
        BrokenInvariantError: The simulator contradicts itself.
    """
    scenario = _scenario(trial)
    done = run(scenario, stop_at_ns=None if trial.to_the_end else scenario.end_ns)
    return _figures(done)


def _scenario(trial: Trial) -> Scenario:
    work, rate = trial.problem.workload, trial.rate_per_s
    warmup_s = max(trial.num_requests * WARMUP_SHARE / rate, _DECODES_MIN * _decode_s(trial))
    end_s = warmup_s + trial.num_requests / rate
    source = Synthetic(
        rate_per_s=rate,
        duration_ns=round(end_s * NS_PER_S),
        lengths=work.lengths,
        output_tokens=work.output_tokens,
        arrival_cv=max(work.arrival_cv, _CV_MIN),
    )
    setup = _with_cached_prefixes(_setup(trial, source.num_prompt_tokens_max), trial.problem)
    return Scenario(
        title=trial.problem.title,
        setup=setup,
        workload=ScaledWorkload(source),
        seed=trial.seed,
        start_ns=round(warmup_s * NS_PER_S),
        end_ns=round(end_s * NS_PER_S),
    )


def _decode_s(trial: Trial) -> float:
    _, step_s = decode_batch(trial.problem, trial.problem.pd)
    return step_s * trial.problem.workload.output_tokens


def _setup(trial: Trial, num_prompt_tokens_max: int) -> Setup:
    local = trial.offload_threshold is None
    file = ScenarioFile(
        title=trial.problem.title,
        plan="",
        workload=WorkloadTable(rate=trial.rate_per_s),
        routing=ScenarioRoutingTable(
            policy=PolicyName.LOCAL if local else PolicyName.PAPER,
            threshold=trial.offload_threshold or 0,
            prefill_instances=trial.num_prefill,
            admission=False,
        ),
    )
    # Threshold and split are given, so the planner has nothing to search.
    lengths = trial.problem.workload.lengths
    given = replace(
        trial.problem,
        ttft_p90_s=None,
        num_prefill=trial.num_prefill,
        threshold=lengths.high if trial.offload_threshold is None else trial.offload_threshold,
    )
    setup, _ = make_setup(file, Question(given, None, given.chunk_tokens), num_prompt_tokens_max)
    return replace(setup, signals=_signals(trial))


def _signals(trial: Trial) -> SignalSetup:
    """Observations of queues; nothing moves the threshold."""
    per_s = min(_OBSERVATIONS_PER_S, _OBSERVATIONS_PER_REQUEST * trial.rate_per_s)
    interval_ns = round(NS_PER_S / per_s)
    return SignalSetup(
        interval_ns=interval_ns, stale_after_ns=6 * interval_ns, loop_interval_ns=10 * interval_ns
    )


def _with_cached_prefixes(setup: Setup, problem: Problem) -> Setup:
    """Charge prefill and decode for the cached part of prompts; simulated ones are what is new."""
    work = problem.workload
    setup = _with_resumed_prefills(setup, problem)
    cached = work.mean_prompt_tokens - problem.mean_new_tokens
    if cached < 1:
        return setup
    limits, contexts = setup.decode, np.array([work.mean_context - cached, work.mean_context])
    if limits.kv_capacity_bytes is not None:
        new, whole = kv_bytes_at(problem.geometry, contexts).tolist()
        limits = replace(limits, kv_capacity_bytes=int(limits.kv_capacity_bytes * new / whole))
    return replace(setup, decode=limits, step_ns=_longer(setup.step_ns, cached))


def _with_resumed_prefills(setup: Setup, problem: Problem) -> Setup:
    """Costs of new tokens after the mean prefix of such prompts."""
    lengths = np.arange(len(setup.costs.local_ns), dtype=np.float64)
    if not problem.workload.lengths.prefix(lengths).any():
        return setup

    def table(profile: PrefillProfile) -> list[int]:
        seconds = problem.workload.prefill_s(profile, lengths)
        found: list[int] = np.rint(seconds * NS_PER_S).astype(np.int64).tolist()
        return [0, *found[1:]]

    local_ns = table(problem.pd.prefill)
    clusters = tuple(
        replace(c, costs=replace(c.costs, local_ns=local_ns, remote_ns=table(planned.prefill)))
        for c, planned in zip(setup.prfaas, problem.prfaas, strict=True)
    )
    costs = clusters[0].costs if clusters else replace(setup.costs, local_ns=local_ns)
    return replace(setup, prfaas=clusters, costs=costs)


def _longer(step_ns: StepTime, cached: float) -> StepTime:
    return lambda batch, context: step_ns(batch, context + cached)


def _figures(done: ScenarioRun) -> Figures:
    scenario, found = done.scenario, done.results
    assert scenario.end_ns is not None  # noqa: S101 (a trial has an end)
    columns = columns_of(done.simulation.requests)
    first = columns["first_token_at_ns"]
    streamed = (first != UNSET) & (first >= scenario.start_ns) & (first < scenario.end_ns)
    remote = np.array([r.offloaded for r in done.simulation.requests], dtype=bool)
    ttft = found.time_to_first_token
    served = found.outcomes.get("finished", 0) + found.outcomes.get("running", 0)
    return Figures(
        num_arrived=found.num_requests,
        arrived_per_s=found.num_requests / found.window_s,
        carried_per_s=float(streamed.sum()) / found.window_s,
        local_per_s=float((streamed & ~remote).sum()) / found.window_s,
        remote_per_s=float((streamed & remote).sum()) / found.window_s,
        offloaded_ratio=found.offloaded_ratio,
        ttft_p90_s=ttft.get("p90", float("inf")) / 1e3,
        ttft_p99_s=ttft.get("p99", float("inf")) / 1e3,
        tpot_s=found.inter_token_latency.get("avg", 0.0) / 1e3,
        num_unserved=found.num_requests - served,
        ttft_s=found.ttft_ms / 1e3,
    )


CARRIED_MIN = 0.98
"""Share of the arrivals that get their first token at the rate at which they come: below it queues
grow. Chance alone moves it by a per cent over 8,000 requests."""
UNSERVED_MAX = 0.001
"""Share of the arrivals that may fail."""
_SHOWN_MIN = 1e-4  # of the mean: narrower intervals are not shown
_TPOT_TOLERANCE = 1.001  # steps are whole nanoseconds


class Finding(StrEnum):
    """Result of a fleet: does it carry the demand within the targets?"""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    NOT_DECIDED = "not decided"
    """A target lies within the interval over the seeds."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Figures of a fleet over several seeds, and the finding."""

    finding: Finding
    carried_ratio: Interval
    """First tokens as a share of the arrivals of the same time."""
    ttft_p90_s: Interval
    """P90 of the time to first token, s."""
    ttft_p99_s: Interval
    """P99 of the same, s."""
    tpot_s: Interval
    """Mean time per output token, s."""
    unserved_ratio: float
    """Share of the arrivals that failed."""
    binding: str
    """The figure that does not hold or is not decided, with its limit, in words; or ""."""


def report(problem: Problem, figures: Sequence[Figures]) -> FleetReport:
    """Judge the figures of all seeds of a fleet.

    Args:
        problem: The question; its targets count.
        figures: Of each seed, at least one.
    """
    carried = interval([each.carried_per_s / each.arrived_per_s for each in figures])
    p90, p99 = _percentile(figures, "ttft_p90_s", 90), _percentile(figures, "ttft_p99_s", 99)
    tpot = interval([each.tpot_s for each in figures])
    unserved = sum(each.num_unserved for each in figures) / sum(e.num_arrived for e in figures)
    failed = Finding.HOLDS if unserved <= UNSERVED_MAX else Finding.DOES_NOT_HOLD
    checks = [(failed, f"{unserved:.1%} of the requests fail")]
    if problem.ttft_p90_s is not None:
        limit = f"the TTFT P90 is {in_words(p90, 1, 's')} against a target of"
        checks.append(
            (_met(problem.ttft_p90_s - p90.mean, p90), f"{limit} {problem.ttft_p90_s:.4g} s")
        )
    if problem.pd.tpot_max_s is not None:
        limit = f"the TPOT is {in_words(tpot, 1e3, 'ms')} against a target of"
        target = problem.pd.tpot_max_s
        checks.append(
            (_met(target * _TPOT_TOLERANCE - tpot.mean, tpot), f"{limit} {target * 1e3:.4g} ms")
        )
    queues = f"{in_words(carried, 100, '%')} of the arrivals are carried, so queues grow"
    checks.append((_met(carried.mean - CARRIED_MIN, carried), queues))
    finding, binding = Finding.HOLDS, ""
    for worst in (Finding.DOES_NOT_HOLD, Finding.NOT_DECIDED):
        missed = [words for found, words in checks if found is worst]
        if missed:
            finding, binding = worst, missed[0]
            break
    return FleetReport(finding, carried, p90, p99, tpot, unserved, binding)


def _percentile(figures: Sequence[Figures], name: str, percentile: float) -> Interval:
    """A percentile over all seeds; without single times, the mean of those of the seeds."""
    runs = [each.ttft_s for each in figures]
    if all(run.size for run in runs):
        return percentile_interval(runs, percentile)
    return interval([getattr(each, name) for each in figures])


def in_words(found: Interval, scale: float, unit: str) -> str:
    """Return a mean and its half-width with a unit.

    An interval that reaches 0 is not shown: the mean is "about" so much then.
    """
    width = found.half_width or 0.0
    if width >= abs(found.mean) > 0:
        return f"about {_digits(found.mean * scale, 2)} {unit}"
    shown = f" ± {_digits(width * scale, 2)}" if width > _SHOWN_MIN * abs(found.mean) else ""
    return f"{_digits(found.mean * scale, 3)}{shown} {unit}"


def _digits(value: float, count: int) -> str:
    """A number with so many digits, and all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 10**count else f"{value:.{count}g}"


def _met(room: float, found: Interval) -> Finding:
    """The finding of a figure whose mean is within its limit by `room`."""
    width = found.half_width or 0.0
    if room >= width:
        return Finding.HOLDS
    return Finding.DOES_NOT_HOLD if room < -width else Finding.NOT_DECIDED
