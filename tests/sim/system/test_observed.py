"""Routing without a plan: offloading that only adds work stops, one that helps stays."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import pytest

from prfaas.core.routing.decision import Reason
from prfaas.core.routing.observed import TRIAL_EVERY, TRIALS
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.results.invariants import check
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import SignalSetup
from prfaas.units import NS_PER_S
from tests.sim.systems import MS, linear_costs, requests_at, system

LONG, SHORT = 6000, 500
THRESHOLD = 1000
SIGNALS = SignalSetup()
US = MS // 1000


def run(
    policy: PolicyName,
    requests: list[Request],
    *,
    local_ns: int = 100 * US,
    remote_ns: int = 100 * US,
    bits_per_s: float = 1e9,
    num_decode: int = 1,
    fixed_ns: int = 0,
) -> Simulation:
    """Two engines: prefill times per token, and a link for 1,000 bytes a token."""
    simulation = Simulation(
        system(
            policy=policy,
            threshold=THRESHOLD,
            num_decode=num_decode,
            bits_per_s=bits_per_s,
            costs=linear_costs(local_ns=local_ns, remote_ns=remote_ns, fixed_ns=fixed_ns),
            signals=SIGNALS,
        ),
        requests,
    )
    simulation.run()
    check(simulation)
    return simulation


def every(gap_s: float, count: int, *lengths: int) -> list[Request]:
    """Requests at equal distances, of lengths that repeat."""
    instants = [round(number * gap_s * NS_PER_S) for number in range(count)]
    return requests_at(instants, list(islice(cycle(lengths), count)))


def mean_ttft_s(simulation: Simulation, first: int = 0) -> float:
    times = [r.first_token_at_ns - r.arrived_at_ns for r in simulation.requests[first:]]
    return float(np.mean(times)) / NS_PER_S


def num_remote(simulation: Simulation, first: int = 0) -> int:
    return sum(r.offloaded for r in simulation.requests[first:])


def test_where_offloading_only_adds_the_link_prompts_come_home() -> None:
    """Equal engines, nobody waits, and the link takes longer than a prefill."""
    requests = every(2.0, 80, LONG, SHORT)
    paper = run(PolicyName.PAPER, every(2.0, 80, LONG, SHORT), bits_per_s=5e7)
    ours = run(PolicyName.OBSERVED, requests, bits_per_s=5e7)
    alone = run(PolicyName.LOCAL, every(2.0, 80, LONG, SHORT), bits_per_s=5e7)
    learnt = 40
    assert num_remote(paper, learnt) == 20
    assert num_remote(ours, learnt) == 0
    assert mean_ttft_s(ours, learnt) == pytest.approx(mean_ttft_s(alone, learnt))
    assert mean_ttft_s(ours, learnt) < 0.9 * mean_ttft_s(paper, learnt)
    reasons = {r.decision.reason for r in ours.requests[learnt:] if r.decision}
    assert reasons == {Reason.FASTER_LOCAL, Reason.BELOW_THRESHOLD}


def test_a_remote_path_that_is_a_tenth_slower_is_left() -> None:
    """A prompt takes 0.60 s at home and 0.67 s away, as two engines on one laptop do."""
    ours, alone = (
        run(policy, every(2.0, 80, LONG, SHORT), bits_per_s=7.2e7)
        for policy in (PolicyName.OBSERVED, PolicyName.LOCAL)
    )
    learnt = 40
    assert num_remote(ours) > 0
    assert num_remote(ours, learnt) == 0
    assert mean_ttft_s(ours, learnt) == pytest.approx(mean_ttft_s(alone, learnt))


def tried(simulation: Simulation) -> list[int]:
    """Places of the prompts that were prefilled locally to see how long that takes."""
    decisions = [request.decision for request in simulation.requests]
    return [n for n, found in enumerate(decisions) if found and found.reason is Reason.TRIED_LOCAL]


def test_a_remote_path_as_fast_as_home_keeps_its_prompts() -> None:
    """But for trials: a few, each after eight prompts that went away."""
    ours = run(PolicyName.OBSERVED, every(2.0, 200, LONG, SHORT))
    assert len(tried(ours)) <= TRIALS
    assert num_remote(ours) == 100 - len(tried(ours))


@pytest.mark.parametrize("gap_s", [0.05, 0.2, 0.4])
def test_a_crowd_uses_both_engines(gap_s: float) -> None:
    """More long prompts than one engine prefills: the PD engine takes its share of them."""
    warm = every(2.0, 40, LONG, SHORT)
    last_ns = warm[-1].arrived_at_ns + 5 * NS_PER_S

    def requests() -> list[Request]:
        crowd = [last_ns + round(number * gap_s * NS_PER_S) for number in range(40)]
        before = every(2.0, 40, LONG, SHORT)
        instants = [r.arrived_at_ns for r in before] + crowd
        return requests_at(instants, [r.num_prompt_tokens for r in before] + [LONG] * 40)

    paper, ours = (run(policy, requests()) for policy in (PolicyName.PAPER, PolicyName.OBSERVED))
    assert num_remote(paper, 40) == 40
    assert 14 <= num_remote(ours, 40) <= 26
    assert mean_ttft_s(ours, 40) < 0.65 * mean_ttft_s(paper, 40)


def test_a_fast_prefill_cluster_gets_what_it_got() -> None:
    requests = every(0.3, 200, LONG, SHORT)
    ours = run(PolicyName.OBSERVED, requests, local_ns=200 * US, remote_ns=40 * US)
    paper = run(
        PolicyName.PAPER, every(0.3, 200, LONG, SHORT), local_ns=200 * US, remote_ns=40 * US
    )
    assert num_remote(paper) == 100
    # One shows that home is slower by as much as its short prompts made it look.
    assert len(tried(ours)) <= 1
    assert num_remote(ours) == 100 - len(tried(ours))


def test_nothing_is_overruled_before_anything_was_seen() -> None:
    """A crowd that comes first has the threshold alone."""
    ours = run(PolicyName.OBSERVED, every(0.0, 16, LONG))
    assert num_remote(ours) == 16


def test_a_remote_path_that_was_not_taken_for_long_is_tried_again() -> None:
    """The link was slow when it was last seen; five minutes later one prompt finds it fast."""
    times = every(2.0, 200, LONG, SHORT)
    ours = run(PolicyName.OBSERVED, times, bits_per_s=5e7)
    assert 1 <= num_remote(ours, 40) <= 2


def test_prompts_come_home_though_only_short_ones_were_prefilled_there() -> None:
    """A short prompt takes 115 ms, of which 100 ms have no length; a long one 0.28 s at home and
    0.58 s away. By the rate of the short ones it would take 1.4 s at home."""

    def simulated(policy: PolicyName) -> Simulation:
        requests = every(2.0, 120, LONG, SHORT)
        return run(policy, requests, local_ns=30 * US, remote_ns=80 * US, fixed_ns=100 * MS)

    ours, alone = simulated(PolicyName.OBSERVED), simulated(PolicyName.LOCAL)
    learnt = 2 * (TRIALS + 1) * (TRIAL_EVERY + 1)
    assert 0 < len(tried(ours)) <= TRIALS
    assert num_remote(ours, learnt) == 0
    assert mean_ttft_s(ours, learnt) == pytest.approx(mean_ttft_s(alone, learnt), rel=0.01)


def test_a_home_that_gets_no_prompts_is_tried_while_it_is_idle() -> None:
    """All prompts are long: nothing is known of home, which is twice as fast."""
    ours = run(PolicyName.OBSERVED, every(2.0, 80, LONG), local_ns=50 * US)
    assert 0 < len(tried(ours)) <= TRIALS
    assert num_remote(ours, 40) == 0
