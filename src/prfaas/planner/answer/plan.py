"""The whole answer to one question."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isinf, sqrt

from prfaas.core.transfer.tcp_goodput import MEASURED
from prfaas.planner.answer.coding import (
    CodingEffect,
    CodingSide,
    asks_for_coding,
    classes_of,
    coding_effect,
    side_of,
    without_coding,
)
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.answer.verdict import LeftOut, Verdict, better_without, judge
from prfaas.planner.problem import Problem
from prfaas.planner.sizing.fleet import Sizing, size
from prfaas.planner.sizing.obstacles import (
    REQUESTS,
    doubt,
    few_long_prompts,
    obstacle,
    rate_variation,
)
from prfaas.planner.solve import designs, latency, sensitivity
from prfaas.planner.solve.designs import Design, gain_at_equal_cost
from prfaas.planner.solve.latency import Latency, TransferOverlap
from prfaas.planner.solve.search import Bottleneck, OperatingPoint
from prfaas.planner.solve.sensitivity import BreakEvenPrice, GainSwing, ShadowValue
from prfaas.planner.solve.throughput import StageMode

DEFAULT_LOAD_RATIO = 0.8  # of Λ_max, for latency with queueing when no arrival rate is given


@dataclass(frozen=True)
class Comparison:
    """The designs in one mode."""

    prfaas: Design
    """PrfaaS-PD at its optimum."""
    equal_gpus: Design
    """Homogeneous, as many GPUs."""
    equal_cost: Design
    """Homogeneous, as much money, the price of links included."""
    naive: Design | None
    """All prefill remote, all decode local; None without a PrfaaS cluster."""

    @property
    def all(self) -> list[Design]:
        """The designs, best known first."""
        found = [self.prfaas, self.equal_gpus, self.equal_cost]
        return found if self.naive is None else [*found, self.naive]

    @property
    def gain(self) -> float:
        """Gain of PrfaaS-PD at equal cost."""
        return gain_at_equal_cost(self.prfaas, self.equal_cost)


@dataclass(frozen=True, slots=True)
class Latencies:
    """TTFT of PrfaaS-PD and its baselines."""

    service: dict[str, Latency]
    """Design name -> service time, the paper's way."""
    overlapped: dict[str, Latency]
    """Design name -> service time with overlapped transfers and a round trip."""
    early: dict[str, Latency]
    """Design name -> service time if the instance that prefills gives the first token; the second
    one comes with `overlapped`."""
    queued: dict[str, Latency]
    """Design name -> with queueing at `arrival_per_s`."""
    arrival_per_s: float
    """Load of `queued`, req/s."""
    overloaded: dict[str, Bottleneck]
    """Design name -> stage that cannot carry this load; `queued` is inf then."""


@dataclass(frozen=True)
class Plan:
    """The whole answer of the planner."""

    question: Question
    paper: Comparison
    """Designs with representative lengths."""
    exact: Comparison
    """Designs with exact expectations."""
    latencies: Latencies
    """Time to first token at the exact optimum's settings."""
    shadow: list[ShadowValue]
    """Value of one more unit of each resource, exact."""
    tornado: list[GainSwing]
    """Gain at equal cost under swings of every input, exact."""
    verdict: Verdict
    sizing: Sizing | None
    """The cheapest fleets for the demand; None without a demand."""
    break_even_bits_per_s: float | None
    """Bandwidth below which it loses; None when it never pays."""
    recompute_bits_per_s: float
    """Bandwidth below which recomputing beats fetching, at l_long."""
    break_even_price: BreakEvenPrice
    """WAN price at which it stops paying, or the reason why there is none."""
    notes: list[str]
    """Assumptions the reader has to know, such as extrapolated profiles."""
    coding: CodingEffect | None = None
    """Changes that coding of links makes; None where all are raw."""
    classes: dict[str, CodingSide] = field(default_factory=dict)
    """The answer with all links in one class, by class; empty unless asked for."""
    left_out: LeftOut | None = None
    """The better plan without some PrfaaS clusters; None where all are worth it."""


@dataclass(frozen=True, slots=True)
class _Judged:
    paper: Comparison
    exact: Comparison
    swings: list[GainSwing]
    sizing: Sizing | None
    verdict: Verdict
    left_out: LeftOut | None


def make_plan(question: Question, *, with_classes: bool = False) -> Plan:
    """Answer a question.

    Args:
        with_classes: Answer it for every class of the links, too.

    Raises:
        ConfigError: The question cannot be answered, for instance if a threshold is outside the
            workload's lengths.
    """
    problem = question.problem
    judged = _judged(question)
    exact, found = judged.exact, judged.exact.prfaas.operation
    long = found.mean_long or problem.mean_new_tokens
    return Plan(
        question=question,
        paper=judged.paper,
        exact=exact,
        latencies=_latencies(question, exact),
        shadow=sensitivity.shadow_values(problem, StageMode.EXACT, found.rate_per_s),
        tornado=judged.swings,
        verdict=judged.verdict,
        sizing=judged.sizing,
        break_even_bits_per_s=sensitivity.break_even_bandwidth(problem, StageMode.EXACT),
        recompute_bits_per_s=sensitivity.recompute_bandwidth(problem, long),
        break_even_price=sensitivity.break_even_price(problem, StageMode.EXACT),
        notes=[*_notes(problem, found), *few_long_prompts(problem, found)],
        coding=_coding(question, judged, long) if asks_for_coding(problem) else None,
        classes=_classes(question) if with_classes else {},
        left_out=judged.left_out,
    )


def _judged(question: Question) -> _Judged:
    problem, demand = question.problem, question.arrival_per_s
    paper, exact = compare(problem, StageMode.PAPER), compare(problem, StageMode.EXACT)
    swings = sensitivity.tornado(problem, StageMode.EXACT)
    sizing = None if demand is None else size(problem, demand)
    is_barred = obstacle(problem, exact.prfaas, demand, sizing)
    left_out = better_without(question, float("-inf") if is_barred else exact.gain)
    verdict = verdict_of(question, paper, exact, swings, sizing, left_out)
    return _Judged(paper, exact, swings, sizing, verdict, left_out)


def _coding(question: Question, judged: _Judged, mean_long: float) -> CodingEffect:
    raw = _judged(replace(question, problem=without_coding(question.problem)))
    return coding_effect(question.problem, mean_long, _side(raw), _side(judged))


def _classes(question: Question) -> dict[str, CodingSide]:
    return {
        name: _side(_judged(replace(question, problem=problem)))
        for name, problem in classes_of(question.problem).items()
    }


def _side(judged: _Judged) -> CodingSide:
    return side_of(judged.exact.prfaas, judged.verdict.answer, judged.exact.gain)


def verdict_of(
    question: Question,
    paper: Comparison,
    exact: Comparison,
    swings: list[GainSwing],
    sizing: Sizing | None,
    left_out: LeftOut | None = None,
) -> Verdict:
    """Judge the computed designs of a question.

    Args:
        paper: Designs with representative lengths.
        exact: Designs with exact expectations.
        swings: Gain at equal cost under swings of every input, exact.
        sizing: The cheapest fleets for the demand, for the sentence; None without.
        left_out: The better plan without some PrfaaS clusters.
    """
    problem = question.problem
    return judge(
        paper.gain,
        exact.gain,
        swings,
        _rates(problem, exact),
        binding=exact.prfaas.operation.binding_in_words,
        obstacle=obstacle(problem, exact.prfaas, question.arrival_per_s, sizing),
        doubt=doubt(problem, exact.prfaas, exact.equal_cost),
        without=left_out,
    )


def compare(problem: Problem, mode: StageMode) -> Comparison:
    """All designs in one mode."""
    ours = designs.prfaas_pd(problem, mode)
    return Comparison(
        prfaas=ours,
        equal_gpus=designs.equal_gpus(problem, mode),
        equal_cost=designs.equal_cost(problem, mode, ours.price_per_h),
        naive=designs.naive_heterogeneous(problem, mode) if problem.prfaas else None,
    )


def _latencies(question: Question, comparison: Comparison) -> Latencies:
    problem, chunk = question.problem, question.chunk_tokens
    load = question.arrival_per_s
    if load is None:
        load = DEFAULT_LOAD_RATIO * comparison.prfaas.operation.rate_per_s
    service, overlapped, early, queued = {}, {}, {}, {}
    overloaded: dict[str, Bottleneck] = {}
    for design in comparison.all:
        found = design.operation
        if not found.rate_per_s or not load:
            continue
        service[design.name] = latency.service_ttft(problem, found)
        overlapped[design.name] = latency.service_ttft(
            problem, found, TransferOverlap.OVERLAPPED, chunk
        )
        early[design.name] = latency.service_ttft(problem, found, TransferOverlap.NOT_AWAITED)
        queued[design.name] = latency.queued_ttft(problem, found, load, chunk)
        if isinf(queued[design.name].mean):
            overloaded[design.name] = found.narrowest
    return Latencies(service, overlapped, early, queued, load, overloaded)


def _rates(problem: Problem, comparison: Comparison) -> str:
    """Rates of PrfaaS-PD and of its baseline as a clause; "" when neither sustains anything.

    Each has two standard errors of what so many requests as in `REQUESTS` give.
    """
    ours, other = comparison.prfaas.operation, comparison.equal_cost.operation
    if not ours.rate_per_s and not other.rate_per_s:
        return ""
    share = ours.offload_fraction
    wander = 2 * sqrt(share * (1 - share) / REQUESTS)
    return (
        f"{_rate(problem, ours)} req/s against {_rate(problem, other)} for the same money, "
        f"{share:.0%} ± {wander:.1%} of requests offloaded (±: by chance, over {REQUESTS:,})"
    )


def _rate(problem: Problem, found: OperatingPoint) -> str:
    wander = rate_variation(problem, found) * found.rate_per_s
    return f"{found.rate_per_s:.3g}" + (f" ± {wander:.1g}" if wander else "")


def _notes(problem: Problem, found: OperatingPoint) -> list[str]:
    lengths = problem.workload.lengths
    notes = []
    for profile in problem.prefill_profiles:
        if not profile.covers(lengths.low, lengths.whole_high):
            notes.append(
                f"{profile.name}: prefill times are extrapolated outside "
                f"{profile.lengths[0]:,.0f}-{profile.lengths[-1]:,.0f} tokens; the workload has "
                f"{lengths.low:,.0f}-{lengths.whole_high:,.0f}"
            )
    for cluster, share in zip(problem.prfaas, found.traffic_shares, strict=True):
        ends, path = cluster.transport, cluster.link.path
        if ends is None or not path.rtt_s:
            continue
        if gaps := MEASURED.gaps(path, ends, found.egress_bits_per_s * share):
            notes.append(f"{cluster.name}: its link was never measured with {'; '.join(gaps)}")
    return notes


def no_offload(found: OperatingPoint) -> bool:
    """Return True if the best plan offloads nothing."""
    return found.offload_fraction < 1e-9
