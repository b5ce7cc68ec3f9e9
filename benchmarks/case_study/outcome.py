"""Outcome of a request, and figures of many."""

from dataclasses import dataclass

from .designs import Window


@dataclass(frozen=True)
class Outcome:
    """A request.

    Attributes:
        arrived: When it came, s.
        first: When its first token came, s; None if it did not before the end.
        offloaded: Whether it was prefilled away.
        error: What went wrong; empty if nothing did.
        done: When its last token came, s; None if it did not before the end.
        relayed: Tokens after the first of the engine that prefilled, where that is known.
    """

    arrived: float
    first: float | None
    offloaded: bool = False
    error: str = ""
    done: float | None = None
    relayed: int = 0


@dataclass(frozen=True)
class Figures:
    """Of one window.

    Attributes:
        per_s: First tokens per second, after the window's warm-up.
        ttft: Mean time to first token of those that arrived in it, s.
        p90: 90th percentile of it, s.
        num_left: Of those that arrived in it, had no first token at the end of the run.
    """

    per_s: float
    ttft: float
    p90: float
    num_left: int


def figures(outcomes: list[Outcome], window: Window) -> Figures:
    """Figures of a window."""
    firsts = [o.first for o in outcomes if o.first is not None]
    count = sum(window.warm <= first < window.end for first in firsts)
    came = [o for o in outcomes if window.start <= o.arrived < window.end]
    waits = sorted(o.first - o.arrived for o in came if o.first is not None)
    return Figures(
        count / (window.end - window.warm),
        sum(waits) / max(len(waits), 1),
        waits[int(0.9 * len(waits))] if waits else 0.0,
        len(came) - len(waits),
    )
