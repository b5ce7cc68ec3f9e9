"""Reactions of a run to failures and delays, by the machine that leads requests in the gateway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.core.request.events import Outcome
from prfaas.core.resilience.quarantine import PAUSE_NS
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import Results, digest
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.setup import Failure, FailureKind, Setup, SignalSetup
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES, MS, requests_at, system

S = NS_PER_S
STEP_NS = 10 * MS


def example(name: str) -> ScenarioRun:
    return run(load_scenario(EXAMPLES / f"{name}.toml"))


def lost(results: Results) -> int:
    return sum(results.outcomes.get(outcome, 0) for outcome in ("failed", "running"))


def played(setup: Setup, prompts: list[int], output: int = 1) -> Simulation:
    instants = [i * S // 10 for i in range(len(prompts))]
    simulation = Simulation(setup, requests_at(instants, prompts, output))
    simulation.run()
    check(simulation)
    assert all(r.outcome is Outcome.FINISHED for r in simulation.requests)
    return simulation


# The scenarios of examples/sim


def test_legs_of_instances_that_die_run_again() -> None:
    found = example("retry").results
    made = found.retries["made"]
    legs = {name: n for name, n in found.fallbacks.items() if name.startswith("decode/")}
    assert legs == found.fallbacks
    assert made == sum(legs.values()) > found.num_touched > 10
    assert lost(found) == 0


def test_streams_of_an_instance_that_dies_go_on_elsewhere() -> None:
    found = example("stream-continued")
    continued = [r for r in found.simulation.requests if r.had_tokens]
    assert len(continued) >= 10
    assert all(r.first_token_at_ns < r.prefill_started_at_ns for r in continued)
    assert found.results.retries["made"] >= len(continued)
    assert lost(found.results) == 0


def test_routes_over_a_link_that_becomes_slow_are_left() -> None:
    found = example("hedge").results
    late = {name: n for name, n in found.fallbacks.items() if name.endswith("/late")}
    assert found.fallbacks == late
    assert found.num_touched == sum(late.values()) >= 3
    assert found.num_recomputed == found.num_touched
    assert lost(found) == 0


def test_the_breaker_of_an_instance_that_ends_nothing_opens() -> None:
    found = example("breaker").results
    assert set(found.breakers_opened) == {"engine r00001"}
    assert found.fallbacks["prefill/stalled"] >= 5
    assert lost(found) == 0


def test_prefills_that_do_not_answer_are_given_up() -> None:
    found = example("prefill-timeout")
    assert found.results.fallbacks["prefill/timeout"] >= 10
    patient = load_scenario(EXAMPLES / "prefill-timeout.toml", ['routing.prefill_timeout="1h"'])
    assert "prefill/timeout" not in run(patient).results.fallbacks
    assert lost(found.results) == 0


@pytest.mark.parametrize("name", ["retry", "breaker"])
def test_what_failures_do_is_repeatable(name: str) -> None:
    assert digest(example(name).simulation) == digest(example(name).simulation)


# By hand


def test_a_stream_goes_on_from_the_tokens_that_its_client_has() -> None:
    # 1 s of prefill, then 10 ms a token; the instance dies after the 51st.
    dies = Failure(FailureKind.DECODE, at_ns=1505 * MS, for_ns=100 * S)
    setup = replace(system(num_decode=2, step_ns=STEP_NS), failures=(dies,))
    (request,) = played(setup, [1000], output=101).requests
    assert request.first_token_at_ns == S
    assert request.had_tokens == 51
    # The other one computes 1,051 tokens, and streams the 50 that are left.
    assert request.finished_at_ns == 1505 * MS + 1051 * MS + 49 * STEP_NS


def test_a_prefill_that_dies_is_done_by_who_decodes() -> None:
    dies = Failure(FailureKind.PREFILL, at_ns=500 * MS, for_ns=100 * S)
    simulation = played(replace(system(num_prefill=2), failures=(dies,)), [1000])
    (request,) = simulation.requests
    assert request.first_token_at_ns == 500 * MS + PAUSE_NS + 1000 * MS
    assert simulation.reactions.fallbacks == {"prefill/unreachable": 1}


def test_an_instance_that_stalls_is_left_after_the_timeout_and_goes_on_later() -> None:
    stalls = Failure(FailureKind.STALL, at_ns=500 * MS, for_ns=10 * S, cluster="prfaas")
    base = system(policy=PolicyName.REMOTE)
    routing = replace(base.routing, prefill_timeout_ns=S)
    simulation = played(replace(base, routing=routing, failures=(stalls,)), [1000])
    (request,) = simulation.requests
    # Half as long again as it should take: by then it is known that it does not get on.
    assert 2 * S < request.first_token_at_ns < 2700 * MS
    assert simulation.reactions.fallbacks == {"prefill/timeout": 1}
    patient = played(replace(base, failures=(stalls,)), [1000, 1000])
    assert sum(patient.reactions.fallbacks.values()) == len(patient.reactions.touched) == 2
    assert all(r.first_token_at_ns < 9 * S for r in patient.requests)


def test_prefill_beside_decode_makes_its_steps_longer() -> None:
    # A chunk of 1,000 tokens takes 1 s: the step in which one is computed takes 1.01 s.
    dies = Failure(FailureKind.PREFILL, at_ns=1050 * MS, for_ns=100 * S)
    setup = replace(system(num_prefill=1, step_ns=STEP_NS), failures=(dies,))
    first, second = played(setup, [1000, 1000], output=101).requests
    # The second prompt is computed by who decodes the first, whose stream stands still meanwhile.
    assert second.first_token_at_ns == 1050 * MS + PAUSE_NS + 1000 * MS + STEP_NS
    assert first.finished_at_ns > second.first_token_at_ns


def test_an_engine_waits_for_blocks_only_so_long() -> None:
    # 1 MB takes 8 s; who decodes waits 2 s after the prefill of 1 s, and computes what is missing.
    base = system(policy=PolicyName.REMOTE, bits_per_s=1e6)
    routing = replace(base.routing, transfer_timeout_ns=2 * S)
    simulation = played(replace(base, routing=routing), [1000])
    (request,) = simulation.requests
    assert request.ttft_ns <= 4 * S
    assert simulation.reactions.num_recomputed == 1


def test_instances_that_prefill_and_decode_do_a_chunk_in_every_step() -> None:
    # Three prompts of 1 s; the first one's stream stands still while the next are computed.
    mixed = system(num_prefill=1, num_decode=0, step_ns=STEP_NS)
    first, second, third = played(mixed, [1000, 1000, 1000], output=21).requests
    assert first.first_token_at_ns == S
    # A chunk and a step of the first one's batch.
    assert second.first_token_at_ns == 2 * S + STEP_NS
    assert third.first_token_at_ns == 3 * S + 2 * STEP_NS
    assert first.finished_at_ns == third.first_token_at_ns + 18 * STEP_NS
    assert played(mixed, [1000, 1000]).reactions.num_recomputed == 0


def test_a_stream_of_an_instance_that_freezes_goes_on_once_three_checks_are_missed() -> None:
    freezes = Failure(FailureKind.FREEZE, at_ns=1505 * MS, for_ns=100 * S)
    base = system(num_prefill=2, num_decode=0, step_ns=STEP_NS)
    simulation = played(replace(base, failures=(freezes,)), [1000], output=101)
    (request,) = simulation.requests
    assert simulation.reactions.fallbacks == {"decode/unreachable": 1}
    assert request.had_tokens == 51
    gone_at_ns = 1505 * MS + base.signals.frozen_after_ns
    assert request.finished_at_ns == gone_at_ns + 1051 * MS + 49 * STEP_NS


def test_a_frozen_instance_gets_no_requests_once_its_last_report_is_old() -> None:
    freezes = Failure(FailureKind.FREEZE, at_ns=S, for_ns=100 * S)
    base = system(num_prefill=2, num_decode=0, step_ns=STEP_NS, signals=SignalSetup())
    setup = replace(base, failures=(freezes,))
    old_at_ns = S + setup.signals.interval_ns + setup.signals.stale_after_ns
    gone_at_ns = S + setup.signals.frozen_after_ns
    # More than the other instance can take alone.
    arrivals = list(range(2 * S, gone_at_ns, 150 * MS))
    simulation = Simulation(setup, requests_at(arrivals, [200] * len(arrivals), output=2))
    simulation.run()
    check(simulation)
    touched = {simulation.requests[index].arrived_at_ns for index in simulation.reactions.touched}
    assert touched
    assert max(touched) < old_at_ns < gone_at_ns - S


def test_a_short_freeze_only_delays() -> None:
    freezes = Failure(FailureKind.FREEZE, at_ns=1505 * MS, for_ns=5 * S)
    setup = replace(system(num_decode=2, step_ns=STEP_NS), failures=(freezes,))
    simulation = played(setup, [1000], output=101)
    assert not simulation.reactions.touched
    assert simulation.requests[0].finished_at_ns == 7 * S


def test_a_dead_instance_is_noticed_by_the_next_request_or_the_next_health_check() -> None:
    for index, arrives_at_ns in enumerate((1010 * MS, 2 * S)):
        dies = Failure(FailureKind.PRFAAS, at_ns=S, for_ns=100 * S)
        setup = replace(system(policy=PolicyName.REMOTE), failures=(dies,))
        simulation = Simulation(setup, requests_at([arrives_at_ns], [1000]))
        simulation.run()
        check(simulation)
        assert simulation.reactions.fallbacks == ({} if index else {"prefill/unreachable": 1})


def test_prompts_that_an_instance_died_with_run_again_one_after_the_other() -> None:
    # All three are in the instance when it dies; each waits until the one before has a token.
    dies = Failure(FailureKind.DECODE, at_ns=900 * MS, for_ns=100 * S)
    base = system(num_prefill=3, num_decode=0, step_ns=STEP_NS)
    setup = replace(base, failures=(dies, replace(dies, index=1)))
    simulation = played(setup, [1000, 1000])
    one, other = sorted(r.first_token_at_ns for r in simulation.requests)
    assert one == 900 * MS + PAUSE_NS + S
    assert other == one + S + STEP_NS
