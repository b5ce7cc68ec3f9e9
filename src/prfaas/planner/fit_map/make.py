"""Make the map of one question; its points as JSON values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from prfaas.core.transfer.tcp_goodput import TcpEnds, TcpPath
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.fit_map.axes import Axes
from prfaas.planner.fit_map.point import Crossover, Fit, Mover, PathPlans, Point, at, movers
from prfaas.planner.problem import Problem
from prfaas.planner.report.json_report import without_infinity
from prfaas.planner.solve.sensitivity import with_workload

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Mix:
    """The map of one mix of lengths."""

    factor: float
    """Factor of the plan's prompt lengths."""
    mean_tokens: float
    """Mean incremental length, tokens."""
    points: dict[tuple[float, float, float], Point]
    """(loss, round trip, bandwidth) -> point."""
    crossovers: dict[tuple[float, float], Crossover]
    """(loss, round trip) -> bandwidth at which it begins to pay."""

    def reasons(self) -> Counter[str]:
        """Points that are not yet proven, by the reason's kind."""
        return Counter(p.doubt.value for p in self.points.values() if p.doubt is not None)


@dataclass(frozen=True)
class Moved:
    """Crossover at one round trip and loss with the plan's own lengths, and what would move it."""

    path: TcpPath
    """Round trip and loss; its bandwidth means nothing."""
    base: Crossover
    movers: list[Mover]
    """Changes, the largest reduction first."""


@dataclass(frozen=True)
class FitMap:
    """The map of one question."""

    title: str
    axes: Axes
    """The points of the map."""
    transport: TcpEnds
    """Both ends of the links; `num_nodes` 0 is one for each host."""
    mixes: list[Mix]
    """One for each length factor."""
    moved: list[Moved]
    """Changes that move the crossover, at the shortest, the middle and the longest round trip."""

    @property
    def shown_loss(self) -> float:
        """Loss of the cells in pictures, and of `moved`: the middle one."""
        return _middle(self.axes.loss)

    def count(self, fit: Fit) -> int:
        """Points with an answer."""
        return sum(p.fit is fit for mix in self.mixes for p in mix.points.values())


def make_map(
    question: Question, axes: Axes, transport: TcpEnds, on_progress: Progress | None = None
) -> FitMap:
    """Plan every point of the axes.

    Args:
        question: The plan; its own bandwidth and round trip give way to the axes.
        axes: The points of the map.
        transport: Both ends of the links.
        on_progress: Called with the rows that are done, and all.

    Raises:
        ConfigError: There is no PrfaaS cluster, or it has no instances, or the question cannot be
            answered.
    """
    problem = question.problem
    if not any(cluster.num_instances for cluster in problem.prfaas):
        raise ConfigError(
            f"{problem.title}: a map needs a PrfaaS cluster with instances; add [[prfaas]] to the "
            "plan file"
        )
    rows, done = len(axes.length_factors) * len(axes.loss) * len(axes.rtt_s), 0
    mixes = []
    for factor in axes.length_factors:
        plans = PathPlans(scaled(problem, factor), transport, question.arrival_per_s)
        mix = Mix(factor, plans.problem.mean_new_tokens, {}, {})
        for loss in axes.loss:
            for rtt_s in axes.rtt_s:
                _add_row(mix, plans, axes, loss, rtt_s)
                done += 1
                if on_progress is not None:
                    on_progress(done, rows)
        mixes.append(mix)
    plans = PathPlans(problem, transport, question.arrival_per_s)
    references = dict.fromkeys((axes.rtt_s[0], _middle(axes.rtt_s), axes.rtt_s[-1]))
    moved = [_moved(plans, TcpPath(1.0, rtt_s, _middle(axes.loss))) for rtt_s in references]
    return FitMap(problem.title, axes, transport, mixes, moved)


def _moved(plans: PathPlans, path: TcpPath) -> Moved:
    base = at(plans, path)
    return Moved(path, base, movers(plans, path, base))


def _add_row(mix: Mix, plans: PathPlans, axes: Axes, loss: float, rtt_s: float) -> None:
    for bits_per_s in axes.bits_per_s:
        point = plans.point(TcpPath(bits_per_s, rtt_s, loss))
        mix.points[loss, rtt_s, bits_per_s] = point
    mix.crossovers[loss, rtt_s] = at(plans, TcpPath(axes.bits_per_s[0], rtt_s, loss))


def scaled(problem: Problem, factor: float) -> Problem:
    """The problem with longer or shorter prompts; thresholds are spaced in proportion."""
    if factor == 1:
        return problem
    spaced = replace(problem, step_tokens=max(1, round(problem.step_tokens * factor)))
    return with_workload(spaced, problem.workload.with_lengths_scaled(factor))


def _middle(values: tuple[float, ...]) -> float:
    return values[(len(values) - 1) // 2]


def as_dict(found: FitMap) -> dict[str, Any]:
    """Nested dicts, lists and numbers; None is a crossover that no bandwidth reaches."""
    transport = found.transport
    values: dict[str, Any] = {
        "title": found.title,
        "congestion_control": transport.control.value,
        "pool_nodes": transport.num_nodes or None,
        "lengths": [_mix(mix) for mix in found.mixes],
        "moved": [_moved_as_dict(moved) for moved in found.moved],
    }
    cleaned: dict[str, Any] = without_infinity(values)
    return cleaned


def _moved_as_dict(moved: Moved) -> dict[str, Any]:
    return {
        "rtt_s": moved.path.rtt_s,
        "loss": moved.path.loss,
        "crossover_bits_per_s": moved.base.bits_per_s,
        "changes": [
            {
                "what": mover.what,
                "crossover_bits_per_s": mover.crossover.bits_per_s,
                "ratio": mover.ratio,
            }
            for mover in moved.movers
        ],
    }


def _mix(mix: Mix) -> dict[str, Any]:
    return {
        "factor": mix.factor,
        "mean_new_tokens": mix.mean_tokens,
        "points": [
            {
                "bits_per_s": point.path.bits_per_s,
                "rtt_s": point.path.rtt_s,
                "loss": point.path.loss,
                "goodput_bits_per_s": point.goodput_bits_per_s,
                "gain_at_equal_cost": point.gain,
                "fit": point.fit.value,
                "doubt": None if point.doubt is None else point.doubt.value,
                "reason": point.reason,
            }
            for point in mix.points.values()
        ],
        "crossovers": [
            {"loss": loss, "rtt_s": rtt_s, "bits_per_s": crossover.bits_per_s}
            for (loss, rtt_s), crossover in mix.crossovers.items()
        ],
    }
