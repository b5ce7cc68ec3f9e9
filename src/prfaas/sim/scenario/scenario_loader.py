"""Loading of a scenario file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prfaas.core.routing.policies import PolicyName
from prfaas.planner.answer.plan_loader import load_question, override
from prfaas.sim.scenario.scenario_file import ScenarioFile
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import Setup
from prfaas.sim.workloads.make import ScaledWorkload, WorkloadTable, make_workload
from prfaas.toml_tables import read_toml, refuse_other_kind, validated
from prfaas.units import ns


@dataclass(frozen=True)
class Scenario:
    """A system, what arrives, and what of it is measured."""

    title: str
    setup: Setup
    workload: ScaledWorkload
    seed: int
    start_ns: int
    """Earlier arrivals are not counted."""
    end_ns: int | None
    """End of the arrivals; None takes the last arrival."""
    notes: tuple[str, ...] = ()
    """Facts that a reader of the results should know."""

    def requests(self) -> list[Request]:
        """The requests of the scenario's seed."""
        return self.workload.requests(self.seed)

    def with_policy(self, policy: PolicyName) -> Scenario:
        """The same with another policy."""
        routing = replace(self.setup.routing, policy=policy)
        return replace(self, setup=replace(self.setup, routing=routing))

    def with_seed(self, seed: int) -> Scenario:
        """The same with another seed."""
        return replace(self, seed=seed)

    def with_rate_scaled(self, factor: float) -> Scenario:
        """The same with arrivals `factor` times as fast."""
        return replace(self, workload=self.workload.with_rate_scaled(factor))


def load_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario file.

    Args:
        path: The file; paths in it start at its directory.
        overrides: Settings such as "workload.rate=3".

    Raises:
        ConfigError: The file or its plan is invalid; the message has the place and the reason.
    """
    tables = read_toml(path)
    refuse_other_kind(tables, path, "prfaas simulate")
    for setting in overrides:
        override(tables, setting)
    file = validated(ScenarioFile, tables, path)
    question = load_question(path.parent / file.plan, file.plan_settings)
    planned = question.problem.workload
    workload = make_workload(file.workload, path.parent, planned, file.cache.block_tokens)
    setup, notes = make_setup(file, question, workload.num_prompt_tokens_max)
    ends_itself = file.workload.arrivals in ("trace", "azure")
    return Scenario(
        title=file.title,
        setup=setup,
        workload=workload,
        seed=file.seed,
        start_ns=ns(file.workload.warmup),
        end_ns=None if ends_itself else ns(file.workload.duration),
        notes=(*_notes(file.workload), *notes),
    )


def _notes(table: WorkloadTable) -> list[str]:
    """Notes on the workload."""
    if table.arrivals == "trace":
        jitter = f"jitter {table.jitter:g} s" if table.jitter else "no jitter within ticks"
        return [f"trace {table.trace}: {jitter}"]
    if table.arrivals == "sessions":
        return [f"closed loop of sessions from {table.trace}: load follows the answers"]
    return []
