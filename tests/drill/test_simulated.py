"""The faults of the drill in the simulator; `python -m tests.drill.simulated` prints them all."""

import itertools

import pytest

from prfaas.core.request.events import Outcome

from .load import LONG_TOKENS, PREFIX_TOKENS, lengths
from .serving import Kind
from .simulated import SHOWN, TIMES, played


@pytest.mark.parametrize("kind", SHOWN)
def test_every_request_ends_whole_whatever_breaks(kind: Kind) -> None:
    simulation = played(kind, 1, slower=2.0)
    assert {request.outcome for request in simulation.requests} == {Outcome.FINISHED}
    assert bool(simulation.reactions.touched) == (kind is not Kind.NOTHING)


def test_a_dead_engine_touches_what_it_had_and_a_frozen_one_what_it_was_sent_as_well() -> None:
    dead, frozen = (played(kind, 1) for kind in (Kind.DECODE_ENGINE, Kind.FROZEN_ENGINE))
    at_ns = round(TIMES.quiet_s * 1e9)
    had, touched = dead.reactions.touched, frozen.reactions.touched
    late = [r for r in frozen.requests if r.arrived_at_ns > at_ns and r.index in touched]
    assert len(had) < len(touched)
    assert late
    # Its last report is too old from then on.
    assert max(r.arrived_at_ns for r in late) < at_ns + 4 * 10**9


def test_two_gateways_send_a_frozen_engine_about_as_many_as_one() -> None:
    one, two = (
        [played(Kind.FROZEN_ENGINE, seed, num_gateways=n) for seed in (1, 2)] for n in (1, 2)
    )
    counts = [sum(len(each.reactions.touched) for each in some) for some in (one, two)]
    assert 0.8 * counts[0] < counts[1] < 1.2 * counts[0]
    # They do not decide alike: each knows of half of the requests.
    assert [each.reactions.touched for each in one] != [each.reactions.touched for each in two]
    for each in two:
        assert {request.outcome for request in each.requests} == {Outcome.FINISHED}


def test_the_load_of_a_seed_is_always_the_same() -> None:
    first, again, other = (list(itertools.islice(lengths(seed), 200)) for seed in (1, 1, 2))
    assert first == again != other
    long = [one for one in first if one.num_prompt_tokens >= LONG_TOKENS[0]]
    assert 5 < len(long) < 50
    assert any(one.prefix is not None for one in long)
    assert LONG_TOKENS[0] > PREFIX_TOKENS
