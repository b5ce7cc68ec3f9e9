"""Outcome of a day."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

PLAN = Path(__file__).with_name("plan.toml")
WRONG = "wrong answer"
"""Error of a request whose answer has other tokens than it has to have."""


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes:
        day_s: Length of the day, wall clock.
        dwell_s: `routing.reroling_dwell`.
        policy: `routing.policy`.
        seed: Of the arrivals.
        ttft_s: Target for the first token.
        tpot_s: Target for each further one.
        num_prefill: Engines that prefill at first, live; None is what the planner says.
    """

    day_s: float = 120.0
    dwell_s: float = 6.0
    policy: str = "adaptive"
    seed: int = 1
    ttft_s: float = 2.0
    tpot_s: float = 0.04
    num_prefill: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A request. Instants in s from the beginning of the day, None for what did not happen.

    Attributes:
        arrived: When it came.
        first: When its first token came.
        ended: When its last token came.
        num_output: Tokens of the answer.
        remote: Whether it was prefilled in the PrfaaS cluster.
        error: What went wrong; empty if nothing did.
    """

    arrived: float
    first: float | None
    ended: float | None
    num_output: int
    remote: bool = False
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token, s; infinite without."""
        return float("inf") if self.first is None else self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Mean time of each further token, s; infinite without."""
        if self.first is None or self.ended is None:
            return float("inf")
        return (self.ended - self.first) / max(self.num_output - 1, 1)


@dataclass(frozen=True)
class Change:
    """An engine took another role.

    Attributes:
        at: When it took nothing new any more, s from the beginning of the day.
        to: Its next role.
        drained_s: Until it worked in that.
        num_left: Requests that it still had; None if that was not counted.
    """

    at: float
    to: str
    drained_s: float
    num_left: int | None = None


@dataclass(frozen=True)
class Run:
    """A day.

    Attributes:
        where: "live" or "simulator".
        reroling: Whether engines changed roles.
        outcomes: Of every request.
        changes: In order.
        facts: What else was seen.
    """

    where: str
    reroling: bool
    outcomes: list[Outcome]
    changes: list[Change]
    facts: dict[str, float] = field(default_factory=dict)
