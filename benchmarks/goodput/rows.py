"""The rows, and what the simulator says of their requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.case_study.outcome import Outcome
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.system.request import UNSET
from prfaas.units import NS_PER_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
RTT_MS = 20
FIVE_GBIT = "prfaas.0.link.bandwidth=5Gbps"


@dataclass(frozen=True)
class Row:
    """A row of docs/results/policies.md.

    Attributes:
        file: Scenario file.
        settings: Changes to it.
        plan_settings: Changes to the plan that threshold and split are made from.
    """

    file: str
    settings: tuple[str, ...]
    plan_settings: tuple[str, ...] = ()


ROWS = {
    "bursty": Row("bursty", ("workload.rate=2.8125",)),
    "scarce-link": Row("scarce-link", ("workload.rate=1.75",), (FIVE_GBIT,)),
    "stale-plan": Row("scarce-link", ("workload.rate=1.75",)),
}


@dataclass(frozen=True)
class Span:
    """Arrivals are in [0, end), and count from `warm`, s; the run ends at `over`."""

    warm: float
    end: float
    over: float


def scenario_of(row: Row, span: Span, policy: str, seed: int) -> Scenario:
    """The scenario of a row, cut to a span."""
    plan = [f"plan_settings={list(row.plan_settings)!r}".replace("'", '"')]
    settings = [
        *(plan if row.plan_settings else ()),
        *row.settings,
        f'workload.duration="{span.end:g}s"',
        f'workload.warmup="{span.warm:g}s"',
        f'link.rtt="{RTT_MS}ms"',
    ]
    made = load_scenario(EXAMPLES / f"{row.file}.toml", settings)
    return made.with_policy(PolicyName(policy)).with_seed(seed)


def simulated(scenario: Scenario) -> list[Outcome]:
    """Simulated results of every request."""
    found = run(scenario).simulation.requests
    return [
        Outcome(
            r.arrived_at_ns / NS_PER_S,
            _seconds(r.first_token_at_ns),
            offloaded=r.offloaded,
            done=_seconds(r.finished_at_ns) if r.first_token_at_ns != UNSET else None,
        )
        for r in found
    ]


def _seconds(at_ns: int) -> float | None:
    return None if at_ns == UNSET else at_ns / NS_PER_S
