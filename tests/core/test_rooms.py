"""Room in the PD cluster's pools: what does not fit is not sent away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.hosts import USABLE_RATIO, DestinationMemory
from prfaas.core.dispatch.types import Arrival, Routed
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import PolicyName

from .dispatching import dispatcher, sent

BLOCK, TOKENS = 1000, 16
LAYOUT = Layout(b"L" * 32, TOKENS, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, TOKENS, BLOCK),))
POOLS = ("home-0", "home-1")


def arrival(number: int, num_blocks: int, **hits: int) -> Arrival:
    tokens = num_blocks * TOKENS
    plain = Arrival(number, tokens + 1, tokens + 1, {}, shippable_tokens=tokens, layout=LAYOUT)
    return plain._replace(hits={name.replace("_", "-"): hit for name, hit in hits.items()})


def with_room_for(num_blocks: int) -> Dispatcher:
    made = dispatcher(PolicyName.REMOTE)
    for pool in POOLS:
        made.rooms.set_capacity(pool, round(num_blocks * BLOCK / USABLE_RATIO))
    return made


def goes(found: Routed) -> tuple[Path, Reason]:
    return found.decision.path, found.decision.reason


HOME, AWAY = (Path.LOCAL, Reason.NO_ROOM), (Path.REMOTE, Reason.ALWAYS_REMOTE)


def test_a_prompt_that_does_not_fit_into_the_pool_at_home_is_prefilled_there() -> None:
    made = with_room_for(10)
    assert goes(sent(made.arrive(arrival(1, 11), 0))) == HOME
    assert goes(sent(made.arrive(arrival(2, 10), 0))) == AWAY


def test_what_the_pool_holds_already_takes_no_room() -> None:
    request = arrival(1, 12, home_0=2 * TOKENS, home_1=2 * TOKENS)
    assert goes(sent(with_room_for(10).arrive(request, 0))) == AWAY


def test_a_pool_that_does_not_say_how_large_it_is_takes_anything() -> None:
    assert goes(sent(dispatcher(PolicyName.REMOTE).arrive(arrival(1, 10**6), 0))) == AWAY
    unknown = arrival(1, 10**6)._replace(layout=None)
    assert goes(sent(with_room_for(1).arrive(unknown, 0))) == AWAY


@pytest.mark.parametrize("event", ["loaded", "fall_back", "end"])
def test_room_is_taken_until_the_blocks_are_loaded_or_given_up(event: str) -> None:
    made = with_room_for(10)
    for number in range(4):
        found = sent(made.arrive(arrival(number, 5), 0))
        assert goes(found) == AWAY, "two for each pool"
    assert goes(sent(made.arrive(arrival(4, 5), 0))) == HOME
    # That the transfer has ended is not enough: the blocks lie in the pool until they are loaded.
    made.requests.transfer_over(3, 0)
    assert goes(sent(made.arrive(arrival(5, 5), 0))) == HOME
    match event:
        case "loaded":
            made.requests.begun(3, 0, is_streamed=False)
        case "fall_back":
            made.requests.fall_back(3, 0)
        case "end":
            made.requests.end(3, 0)
    numbers = range(6, 9)
    taken = [goes(sent(made.arrive(arrival(number, 5), 0))) for number in numbers]
    assert taken.count(AWAY) == 1
    for number in range(9):
        made.requests.end(number, 0)
    assert made.rooms.taken_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.booleans()), max_size=40))
def test_a_pool_never_has_more_on_its_way_than_its_share(
    events: list[tuple[int, int, bool]],
) -> None:
    rooms = DestinationMemory()
    rooms.set_capacity("pool", 10 * BLOCK)
    for request_id, num_blocks, comes in events:
        length = num_blocks * TOKENS
        rooms.give_back(request_id)
        if comes and rooms.fits("pool", LAYOUT, 0, length):
            rooms.take(request_id, "pool", LAYOUT, 0, length)
        assert rooms.taken_bytes <= 10 * BLOCK * USABLE_RATIO
    for request_id in range(6):
        rooms.give_back(request_id)
    assert rooms.taken_bytes == 0
