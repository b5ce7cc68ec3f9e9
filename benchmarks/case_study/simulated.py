"""The same requests through the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.two_sites import PLAN
from prfaas.planner.answer.plan_loader import Question, override
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.scenario.scenario_file import ScenarioFile
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.system.request import UNSET, Request
from prfaas.toml_tables import read_toml, validated
from prfaas.units import NS_PER_S

from .designs import Design, problem_of
from .outcome import Outcome

SCENARIO = Path(__file__).parents[2] / "examples" / "sim" / "paper-poisson.toml"


def simulate(
    question: Question,
    design: Design,
    asked: list[Request],
    end_s: float,
    rtt_s: float,
    more: Sequence[str] = (),
) -> list[Outcome]:
    """The simulator's outcome of every request, up to the end of the run.

    Args:
        more: Further settings of the scenario.
    """
    tables = read_toml(SCENARIO)
    for setting in (
        f"routing.policy={design.policy.value}",
        f"routing.threshold={design.threshold}",
        f"routing.prefill_instances={design.num_prefill}",
        f"link.rtt={rtt_s * 1e3:g}ms",
        # The live gateway has no `ttft_max`: it refuses nobody.
        "routing.admission=false",
        f"routing.early_first_token={'auto' if design.is_early else 'off'}",
        f"routing.relay_decode={'auto' if design.relays else 'off'}",
        *more,
    ):
        override(tables, setting)
    file = validated(ScenarioFile, tables, PLAN)
    problem = problem_of(design, question.problem)
    longest = max(request.num_prompt_tokens for request in asked)
    setup, _ = make_setup(file, replace(question, problem=problem), longest)
    simulation = Simulation(setup, asked)
    simulation.run(round(end_s * NS_PER_S))
    return [
        Outcome(
            r.arrived_at_ns / NS_PER_S,
            None if r.first_token_at_ns == UNSET else r.first_token_at_ns / NS_PER_S,
            offloaded=r.offloaded,
            relayed=r.relayed_tokens,
        )
        for r in simulation.requests
    ]
