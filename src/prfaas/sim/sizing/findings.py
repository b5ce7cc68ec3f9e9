"""Findings of simulated fleets: does one carry a demand within its targets?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prfaas.planner.problem import Problem
from prfaas.sim.scenario.seeds import Interval, interval, percentile_interval
from prfaas.sim.sizing.trial import Figures

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
    """Figures of a fleet over several seeds, and the finding.

    Args:
        carried_ratio: First tokens as a share of the arrivals of the same time.
        ttft_p90_s: P90 of the time to first token, s.
        ttft_p99_s: P99 of the same, s.
        tpot_s: Mean time per output token, s.
        unserved_ratio: Share of the arrivals that failed.
        binding: The figure that does not hold or is not decided, with its limit, in words; or "".
    """

    finding: Finding
    carried_ratio: Interval
    ttft_p90_s: Interval
    ttft_p99_s: Interval
    tpot_s: Interval
    unserved_ratio: float
    binding: str


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
