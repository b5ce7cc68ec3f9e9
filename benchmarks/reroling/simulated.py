"""The same requests through the simulator."""

from __future__ import annotations

from prfaas.planner.answer.plan_loader import load_question
from prfaas.sim.engine.role_changes import as_dict
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.scenario.scenario_file import ScenarioFile
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.system.request import Request
from prfaas.toml_tables import validated
from prfaas.units import NS_PER_S

from .outcome import PLAN, Change, Outcome, Run, Settings


def simulate(settings: Settings, asked: list[Request], *, reroling: bool) -> Run:
    """The simulator's outcome of every request, and its roles."""
    tables = {
        "title": "a day",
        "plan": str(PLAN),
        "workload": {"rate": 1.0},
        "routing": {
            "policy": settings.policy,
            "reroling": reroling,
            "dwell": f"{settings.dwell_s}s",
            "conversion": "0s",
        },
        # As often as a gateway looks at its engines, and the loop at what it saw.
        "signals": {"interval": "1s", "loop_interval": "1s", "stale_after": "10s"},
    }
    file = validated(ScenarioFile, tables, PLAN)
    question = load_question(PLAN)
    setup, _ = make_setup(file, question, max(r.num_prompt_tokens for r in asked))
    simulation = Simulation(setup, asked)
    simulation.run()
    outcomes = []
    for r in simulation.requests:
        arrived, first = r.arrived_at_ns / NS_PER_S, r.first_token_at_ns / NS_PER_S
        ended = r.finished_at_ns / NS_PER_S
        remote = r.offloaded
        outcomes.append(Outcome(arrived, first, ended, r.num_output_tokens, remote=remote))
    changes = []
    for change in map(as_dict, simulation.roles.changes):
        if change["ended_at_s"] is not None and change["drained_at_s"] is None:
            continue  # given up
        drained = (change["ended_at_s"] or ended) - change["began_at_s"]
        changes.append(Change(change["began_at_s"], change["to"], drained))
    return Run("simulator", reroling, outcomes, changes)
