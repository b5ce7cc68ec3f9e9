"""Whole runs: determinism, checkers, failures, limits, signals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.errors import ConfigError
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import BrokenInvariantError, check
from prfaas.sim.results.summary import digest
from prfaas.sim.scenario.run import find_knee, run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import (
    BlockSetup,
    CacheSetup,
    DecodeLimits,
    Failure,
    FailureKind,
    LinkSetup,
    SloSetup,
)
from prfaas.units import NS_PER_S
from tests.sim.reachable import simulator_types_held_by
from tests.sim.systems import EXAMPLES, MS, linear_costs, requests_at, short, system

FAILURES = st.lists(
    st.builds(
        Failure,
        kind=st.sampled_from(FailureKind),
        at_ns=st.integers(0, 20 * NS_PER_S),
        for_ns=st.integers(1, 20 * NS_PER_S),
        index=st.integers(0, 1),
        capacity_ratio=st.sampled_from([0.0, 0.1]),
    ).map(lambda f: replace(f, index=0) if f.kind is FailureKind.POOL else f),
    max_size=2,
    unique_by=lambda f: (f.kind, f.index) if f.kind is not FailureKind.LINK else f.kind,
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 3 * NS_PER_S), st.integers(1, 8000), st.integers(1, 200)),
    min_size=1,
    max_size=25,
)


def made(rows: list[tuple[int, int, int]]) -> list[Request]:
    at_ns, found = 0, []
    for i, (gap, prompt, output) in enumerate(rows):
        at_ns += gap
        blocks = tuple(range(prompt // 512)) if i % 2 else (1000 * i,)
        found.append(Request(i, at_ns, prompt, output, blocks))
    return found


@settings(max_examples=60)
@given(
    rows=REQUESTS,
    failures=FAILURES,
    policy=st.sampled_from(PolicyName),
    batch_max=st.integers(1, 4),
    capacity=st.none() | st.integers(8_200_000, 20_000_000),
    bits_per_s=st.sampled_from([1e6, 1e8, 1e10]),
    rtt_ns=st.integers(0, NS_PER_S // 10),
    pd_blocks=st.sampled_from([0, 3, None]),
)
def test_every_run_passes_the_checkers_and_is_repeatable(
    rows: list[tuple[int, int, int]],
    failures: list[Failure],
    policy: PolicyName,
    batch_max: int,
    capacity: int | None,
    bits_per_s: float,
    rtt_ns: int,
    pd_blocks: int | None,
) -> None:
    setup = replace(
        system(
            policy=policy,
            num_prfaas=2,
            num_prefill=2,
            num_decode=2,
            costs=linear_costs(local_ns=3 * MS, state_bytes=5000),
            link=LinkSetup(bits_per_s, rtt_ns),
            cache=CacheSetup(10),
        ),
        decode=DecodeLimits(batch_max, capacity),
        failures=tuple(failures),
        cache=CacheSetup(pd_blocks),
        blocks=BlockSetup(checkpoint_blocks=1),
    )
    digests = []
    for _ in range(2):
        simulation = Simulation(setup, made(rows))
        simulation.run()
        check(simulation)
        assert all(r.outcome is not Outcome.RUNNING for r in simulation.requests)
        digests.append(digest(simulation))
    assert digests[0] == digests[1]


def test_a_checker_notices_a_leak_and_a_request_out_of_order() -> None:
    simulation = Simulation(system(), requests_at([0], [100]))
    simulation.run()
    check(simulation)
    link = simulation.front.dispatcher.links.between("prfaas", "pd")
    link.book.promise(7, 0)
    with pytest.raises(BrokenInvariantError, match="7 bytes promised"):
        check(simulation)
    link.book.settle(7)
    simulation.requests[0].prefilled_at_ns = 10**15
    with pytest.raises(BrokenInvariantError, match="do not follow"):
        check(simulation)


def test_a_cut_link_sends_its_requests_home() -> None:
    cut = Failure(FailureKind.LINK, at_ns=NS_PER_S, for_ns=60 * NS_PER_S)
    setup = replace(system(policy=PolicyName.REMOTE), failures=(cut,))
    simulation = Simulation(setup, requests_at([0, 10 * NS_PER_S, 80 * NS_PER_S], [3000] * 3))
    simulation.run()
    check(simulation)
    first, during, after = simulation.requests
    assert simulation.reactions.num_recomputed == 1
    # The cut is noticed after 5 s of silence; then 3 s of local prefill.
    assert first.first_token_at_ns == 9 * NS_PER_S
    assert during.decision is not None
    assert during.decision.reason is Reason.LINK_DOWN
    assert after.decision is not None
    assert after.decision.reason is Reason.ALWAYS_REMOTE


def test_waiting_transfers_hold_kv_blocks() -> None:
    setup = replace(
        system(policy=PolicyName.REMOTE, num_prfaas=2, bits_per_s=1e6),
        decode=DecodeLimits(10, 1_001_000),
    )
    simulation = Simulation(setup, requests_at([0, 0], [1000, 1000]))
    simulation.run()
    check(simulation)
    # Both transfers arrive together after 17 s, but there are blocks for one at a time.
    assert simulation.decoders["d00000"].kv_used_bytes == 0
    assert all(r.outcome is Outcome.FINISHED for r in simulation.requests)


def test_what_never_fits_fails_instead_of_waiting_for_ever() -> None:
    setup = replace(system(), decode=DecodeLimits(10, 500_000))
    simulation = Simulation(setup, requests_at([0, 0], [1000, 100]))
    simulation.run()
    check(simulation)
    assert [r.outcome for r in simulation.requests] == [Outcome.FAILED, Outcome.FINISHED]


def test_admission_refuses_what_would_come_too_late() -> None:
    base = system()
    setup = replace(base, slo=SloSetup(5 * NS_PER_S), routing=replace(base.routing, admission=True))
    setup = replace(setup, signals=replace(setup.signals, stale_after_ns=10**15))
    simulation = Simulation(setup, requests_at([MS] * 10, [1000] * 10))
    simulation.run()
    check(simulation)
    outcomes = [r.outcome for r in simulation.requests]
    assert outcomes == [Outcome.FINISHED] * 5 + [Outcome.REJECTED] * 5


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_example_runs(example: object) -> None:
    found = run(short(EXAMPLES / str(example)))
    assert found.results.outcomes
    assert simulator_types_held_by(found.simulation.front.dispatcher) == set()


def test_policies_are_compared_on_the_same_requests() -> None:
    scenario = load_scenario(EXAMPLES / "paper-poisson.toml", ['workload.duration="10min"'])
    policies = PolicyName.PAPER, PolicyName.ADAPTIVE
    runs = {policy: run(scenario.with_policy(policy)) for policy in policies}
    arrivals = [[r.arrived_at_ns for r in found.simulation.requests] for found in runs.values()]
    assert arrivals[0] == arrivals[1]


def test_the_knee_is_where_the_targets_stop_to_hold() -> None:
    scenario = load_scenario(
        EXAMPLES / "paper-poisson.toml", ['workload.duration="20min"', "routing.policy=paper"]
    )
    knee = find_knee(scenario, 0.9, tolerance=0.05)
    assert knee is not None
    assert knee.results.slo_attainment >= 0.9
    assert 1.0 < knee.scale < 1.5


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("routing.treshold=5", "nearest valid one is 'threshold'"),
        ("workload.rate=0", "greater than or equal to 0"),
        ("routing.prefill_instances=8", "at least one has to be left"),
        ("workload.rate=1e6", "at most 5,000,000"),
        ("workload.arrivals=trace", "needs trace"),
    ],
)
def test_a_wrong_scenario_is_one_clear_error(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scenario(EXAMPLES / "paper-poisson.toml", [setting]).requests()


def test_a_failure_of_an_instance_that_is_not_there_is_refused() -> None:
    failure = 'failure=[{kind="decode", at="1s", duration="1s", index=5}]'
    with pytest.raises(ConfigError, match="decode instance 5: there are 5"):
        load_scenario(EXAMPLES / "paper-poisson.toml", [failure])
