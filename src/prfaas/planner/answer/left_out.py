"""PrfaaS clusters that a plan is better without: behind a slow link, dear, or not needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.problem import Problem
from prfaas.planner.sizing.obstacles import obstacle
from prfaas.planner.solve import designs
from prfaas.planner.solve.designs import gain_at_equal_cost
from prfaas.planner.solve.throughput import StageMode

GAIN_MIN = 0.005
"""Gain at equal cost by which a plan has to be better before a cluster is left out."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The plan without some of its PrfaaS clusters.

    Args:
        names: Clusters that are left out.
        gain: Gain at equal cost of the rest, exact.
        rate_per_s: Λ_max of the rest, req/s.
        offload_threshold: t of the rest, tokens.
        price_per_h: Price of the rest for one hour, traffic included.
    """

    names: tuple[str, ...]
    gain: float
    rate_per_s: float
    offload_threshold: int | None
    price_per_h: float

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
