"""Pays, does not pay, or depends: one sentence with the numbers; plans without some clusters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.problem import Problem
from prfaas.planner.sizing.obstacles import obstacle
from prfaas.planner.solve import designs
from prfaas.planner.solve.designs import gain_at_equal_cost
from prfaas.planner.solve.sensitivity import GainSwing
from prfaas.planner.solve.throughput import StageMode

GAIN_MIN = 0.005
"""Gain at equal cost by which a plan has to be better before a cluster is left out."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The plan without some of its PrfaaS clusters."""

    names: tuple[str, ...]
    """Clusters that are left out."""
    gain: float
    """Gain at equal cost of the rest, exact."""
    rate_per_s: float
    """Λ_max of the rest, req/s."""
    offload_threshold: int | None
    """t of the rest, tokens."""
    price_per_h: float
    """Price of the rest for one hour, traffic included."""

    @property
    def clause(self) -> str:
        """The names and the gain, as a part of a sentence."""
        return f"without {' and '.join(self.names)} it is {self.gain:+.1%}"


def better_without(question: Question, gain: float) -> LeftOut | None:
    """The clusters whose leaving out raises the gain most, one after the other; None without any.

    At least one cluster is kept. What the rest cannot carry of a demand, or not within a target,
    is no alternative.

    Args:
        gain: Gain at equal cost of all clusters, exact.
    """
    best, found = question.problem, None
    while len(best.prfaas) > 1:
        tried = [_without(question, best, index) for index in range(len(best.prfaas))]
        rest, better = max(tried, key=lambda each: each[1].gain)
        if not better.gain > (found.gain if found else gain) + GAIN_MIN:
            break
        best, found = rest, better
    return found


def _without(question: Question, problem: Problem, index: int) -> tuple[Problem, LeftOut]:
    kept = (*problem.prfaas[:index], *problem.prfaas[index + 1 :])
    rest = replace(problem, prfaas=kept)
    names = {cluster.name for cluster in kept}
    ours = designs.prfaas_pd(rest, StageMode.EXACT)
    other = designs.equal_cost(rest, StageMode.EXACT, ours.price_per_h)
    demand = question.arrival_per_s or 0.0
    is_barred = demand > ours.operation.rate_per_s or bool(obstacle(rest, ours, None, None))
    return rest, LeftOut(
        tuple(c.name for c in question.problem.prfaas if c.name not in names),
        float("-inf") if is_barred else gain_at_equal_cost(ours, other),
        ours.operation.rate_per_s,
        ours.operation.whole_threshold,
        ours.price_per_h,
    )


class VerdictAnswer(StrEnum):
    """Verdict on Prefill-as-a-Service."""

    PAYS = "pays"
    DOES_NOT_PAY = "does not pay"
    DEPENDS = "depends"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer and its reason."""

    answer: VerdictAnswer
    """Pays when the gain at equal cost is positive in both modes and no single input, 20 % lower or
    higher, turns it; does not pay when all of these are zero or negative, also without some of the
    PrfaaS clusters; depends otherwise. A target or demand that cannot be met does not pay."""
    sentence: str
    """The answer with its numbers."""
    turning: tuple[str, ...]
    """Inputs that turn the sign within their swing."""
    between: tuple[float, float] | None = None
    """Least and largest gain with any one input 20 % lower or higher; None with an obstacle."""


def judge(
    gain_paper: float,
    gain_exact: float,
    swings: list[GainSwing],
    reason: str,
    *,
    binding: str = "",
    obstacle: str = "",
    doubt: str = "",
    without: LeftOut | None = None,
) -> Verdict:
    """The verdict.

    Args:
        gain_paper: Gain at equal cost with representative lengths.
        gain_exact: Gain at equal cost with exact expectations.
        swings: The tornado of the exact gain.
        reason: The rates, as the end of a sentence.
        binding: Stages that bind, as a clause after the reason. An obstacle names its own.
        obstacle: A target or demand that the plan cannot meet, with its cure; it does not pay then.
            "" when all are met.
        doubt: Why a gain may not count, as a part of a sentence; it depends then.
        without: The better plan without some PrfaaS clusters; it depends if that alone gains.
    """
    if without is not None:
        reason = ", ".join(clause for clause in (reason, binding) if clause)
        reason, binding = f"{reason}; {without.clause}", ""
    if obstacle:
        clauses = "; ".join(clause for clause in (obstacle, reason) if clause)
        if without is not None and without.gain > 0:
            return Verdict(VerdictAnswer.DEPENDS, f"It depends on the clusters: {clauses}.", ())
        return Verdict(
            VerdictAnswer.DOES_NOT_PAY, f"Prefill-as-a-Service does not pay: {clauses}.", ()
        )
    reason = ", ".join(clause for clause in (reason, binding) if clause)
    is_gain = gain_exact > 0
    turning = tuple(s.what for s in swings if (s.low > 0) != is_gain or (s.high > 0) != is_gain)
    is_rest = without is not None and without.gain > 0 and not is_gain
    if (gain_paper > 0) != is_gain or turning or (doubt and is_gain) or is_rest:
        answer = VerdictAnswer.DEPENDS
    else:
        answer = VerdictAnswer.PAYS if is_gain else VerdictAnswer.DOES_NOT_PAY
    gains = [gain_exact, *(gain for swing in swings for gain in (swing.low, swing.high))]
    between = min(gains), max(gains)
    sentence = _sentence(answer, (gain_paper, gain_exact), between, turning, reason, doubt)
    return Verdict(answer, sentence, turning, between)


def _sentence(
    answer: VerdictAnswer,
    both: tuple[float, float],
    between: tuple[float, float],
    turning: tuple[str, ...],
    reason: str,
    doubt: str,
) -> str:
    gain_paper, gain_exact = both
    low, high = between
    gains = (
        f"{gain_exact:+.1%} at equal cost ({gain_paper:+.1%} with the paper's mean lengths; "
        f"{low:+.1%} to {high:+.1%} with one input 20 % off)"
    )
    if gain_exact == float("inf"):
        gains = "the homogeneous fleet for the same money misses the target at any load"
    if answer is VerdictAnswer.PAYS:
        return f"Prefill-as-a-Service pays: {gains}; no single input 20 % off turns it; {reason}."
    if answer is VerdictAnswer.DOES_NOT_PAY:
        return (
            f"Prefill-as-a-Service does not pay: {gains}, and no single input 20 % off turns it; "
            f"{reason}."
        )
    if doubt and gain_exact > 0:
        return f"It depends: {gains}, but {doubt}; {reason}."
    on = f"20 % on {_listed(turning)} turns it" if turning else ""
    if not on and (gain_paper > 0) != (gain_exact > 0):
        on = "the two modes disagree"
    if not on:
        return f"It depends on the clusters: {gains} with all of them; {reason}."
    return f"It depends: {gains}, but {on}; {reason}."


def _listed(names: tuple[str, ...]) -> str:
    if len(names) > 3:
        return f"{', '.join(names[:3])} or {len(names) - 3} more"
    return " or ".join(names)
