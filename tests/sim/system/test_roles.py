"""PD instances that change their roles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.control.role_loop import Role, RoleSettings
from prfaas.core.request.events import Outcome
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import BrokenInvariantError, check
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import UNSET, Request
from prfaas.sim.system.setup import DecodeLimits, RolesSetup, Setup, SignalSetup
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, MS, requests_at, system

EAGER = RoleSettings(
    patience_ns=2 * NS_PER_S, dwell_ns=3 * NS_PER_S, smoothing_ns=0, conversion_ns=NS_PER_S
)


def changing(num_prefill: int, num_decode: int, batch_max: int) -> Setup:
    return replace(
        system(
            num_prefill=num_prefill,
            num_decode=num_decode,
            step_ns=10 * MS,
            signals=SignalSetup(loop_interval_ns=NS_PER_S),
        ),
        decode=DecodeLimits(batch_max),
        roles=RolesSetup(EAGER),
    )


def test_a_pressed_prefill_stage_takes_over_an_idle_decode_instance() -> None:
    at_ns = [i * NS_PER_S // 2 for i in range(60)]
    simulation = Simulation(changing(1, 3, 100), requests_at(at_ns, [1000] * 60, output=2))
    simulation.run()
    check(simulation)
    first = simulation.roles.changes[0]
    assert first.to is Role.PREFILL
    assert first.drained_at_ns + EAGER.conversion_ns == first.ended_at_ns
    alone = Simulation(replace(changing(1, 3, 100), roles=None), requests_at(at_ns, [1000] * 60))
    alone.run()
    # 60 prompts of one second: alone they take a minute.
    assert alone.clock.now_ns >= 60 * NS_PER_S
    last = max(r.first_token_at_ns for r in simulation.requests)
    assert last < 50 * NS_PER_S


def test_a_draining_instance_ends_its_work_and_takes_no_more() -> None:
    # Three instances prefill little; decode is pressed by long outputs.
    requests = requests_at([i * NS_PER_S // 4 for i in range(200)], [50] * 200, output=2000)
    simulation = Simulation(changing(3, 1, 4), requests)
    simulation.run()
    check(simulation)
    assert simulation.roles.changes
    change = simulation.roles.changes[0]
    assert change.to is Role.DECODE
    assert UNSET not in (change.began_at_ns, change.drained_at_ns, change.ended_at_ns)
    assert all(r.outcome is Outcome.FINISHED for r in simulation.requests)
    assert simulation.reactions.num_recomputed == 0


def test_a_drain_that_does_not_end_is_given_up() -> None:
    setup = changing(1, 2, 100)
    limits = replace(EAGER, drain_max_ns=5 * NS_PER_S)
    requests = requests_at([0, 1], [50, 50], output=4000)
    requests += [Request(2 + i, NS_PER_S + i * NS_PER_S // 2, 1000, 2) for i in range(40)]
    simulation = Simulation(replace(setup, roles=RolesSetup(limits)), requests)
    simulation.run()
    check(simulation)
    first, second = simulation.roles.changes[:2]
    assert (first.drained_at_ns, second.drained_at_ns) == (UNSET, UNSET)
    assert first.ended_at_ns - first.began_at_ns >= 5 * NS_PER_S
    assert first.index != second.index, "the other one is tried next"
    assert all(r.outcome is Outcome.FINISHED for r in simulation.requests)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2 * NS_PER_S), st.integers(1, 8000), st.integers(1, 800)),
        min_size=1,
        max_size=40,
    ),
    policy=st.sampled_from(PolicyName),
    num_prefill=st.integers(1, 4),
    batch_max=st.integers(1, 4),
)
def test_every_run_with_changing_roles_passes_the_checkers(
    rows: list[tuple[int, int, int]], policy: PolicyName, num_prefill: int, batch_max: int
) -> None:
    setup = changing(num_prefill, 5 - num_prefill, batch_max)
    setup = replace(setup, routing=replace(setup.routing, policy=policy))
    at_ns, requests = 0, []
    for i, (gap, prompt, output) in enumerate(rows):
        at_ns += gap
        requests.append(Request(i, at_ns, prompt, output))
    simulation = Simulation(setup, requests)
    simulation.run()
    check(simulation)
    assert all(r.outcome is Outcome.FINISHED for r in simulation.requests)
    total = simulation.roles.time_ns(Role.PREFILL) + simulation.roles.time_ns(Role.DECODE)
    assert total == 5 * simulation.clock.now_ns


def test_the_checker_notices_work_in_the_wrong_role() -> None:
    simulation = Simulation(changing(1, 1, 4), requests_at([0], [100]))
    simulation.run(stop_at_ns=1)
    simulation.decoders["p00000:decode"]._waiting.append(Request(7, 0, 100, 100))
    with pytest.raises(BrokenInvariantError, match="instance 0 prefills, yet has sequences"):
        check(simulation)


def test_a_wrong_split_is_mended_and_the_threshold_planned_anew() -> None:
    settings_ = ['workload.duration="40min"', "routing.prefill_instances=6", "workload.rate=2.5"]
    # The static rule, and nothing refused: what changes is the roles' work alone.
    settings_ += ["routing.admission=false", "routing.policy=paper"]
    stuck = run(load_scenario(EXAMPLES / "paper-poisson.toml", settings_)).results
    moved = run(
        load_scenario(EXAMPLES / "paper-poisson.toml", [*settings_, "routing.reroling=true"])
    )
    assert [c["to"] for c in moved.results.role_changes] == ["decode"] * 3
    samples = moved.simulation.series.samples
    assert [(s.num_prefill, s.num_decode) for s in (samples[0], samples[-1])] == [(6, 2), (3, 5)]
    assert moved.results.slo_attainment > stuck.slo_attainment + 0.3
    assert moved.simulation.front.offload_threshold == pytest.approx(19_600, rel=0.02)


def test_failures_of_pd_instances_are_refused_together_with_changing_roles() -> None:
    failure = 'failure=[{kind="decode", at="1s", duration="1s"}]'
    with pytest.raises(ConfigError, match="failures of PD instances"):
        load_scenario(EXAMPLES / "paper-poisson.toml", [failure, "routing.reroling=true"])
