"""The transfer table: every state with every event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfer.transfer_state import (
    ENDS,
    LINK_FAULTS,
    TRANSITIONS,
    Transfer,
    TransferEnd,
    TransferEvent,
    TransferState,
)

S, E = TransferState, (*TransferEvent, *TransferEnd)
Event = TransferEvent | TransferEnd
OPEN = [state for state in S if state not in ENDS]
EVENTS = st.lists(st.sampled_from(E), max_size=12)


def a_transfer(state: TransferState = S.OFFERED) -> Transfer:
    return Transfer(b"t" * 16, "peer", opened_at_ns=1, deadline_ns=10, state=state)


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_pair_does_what_the_table_says(
    state: TransferState, event: TransferEvent | TransferEnd
) -> None:
    transfer = a_transfer(state)
    following = TRANSITIONS.get((state, event))
    assert transfer.apply(event, "because") is (following is not None)
    assert transfer.state is (following or state)
    assert transfer.end is (event if following in ENDS else None)
    is_told = following in ENDS and following is not S.COMMITTED
    assert transfer.reason == ("because" if is_told else "")
    assert transfer.is_open is (transfer.state not in ENDS)


@pytest.mark.parametrize("state", sorted(ENDS))
def test_nothing_follows_an_end(state: TransferState) -> None:
    assert not [event for event in E if (state, event) in TRANSITIONS]


@pytest.mark.parametrize("state", OPEN)
def test_whatever_is_open_can_be_refused_or_given_up_and_runs_out(state: TransferState) -> None:
    for end in set(TransferEnd) - {TransferEnd.COMMITTED}:
        assert TRANSITIONS[state, end] is end.state is not S.COMMITTED


def test_only_what_was_sent_commits() -> None:
    assert [state for state in S if (state, TransferEnd.COMMITTED) in TRANSITIONS] == [S.SENT]


@pytest.mark.parametrize("event", E)
def test_an_event_never_leads_to_two_ends(event: Event) -> None:
    ends = {end for (_, cause), end in TRANSITIONS.items() if cause is event}
    assert len(ends) == 1


@given(events=EVENTS)
def test_the_first_end_stays_and_a_repetition_changes_nothing(
    events: list[TransferEvent | TransferEnd],
) -> None:
    transfer = a_transfer()
    end: TransferState | None = None
    for number, event in enumerate(events):
        changed = transfer.apply(event, str(number))
        assert not transfer.apply(event, "again")
        assert not (end and changed)
        end = end or (transfer.state if not transfer.is_open else None)
        assert transfer.state is (end or transfer.state)
        assert transfer.reason != "again"
    assert transfer.is_open is (end is None)


def test_blocks_are_counted_with_their_bytes_and_the_time_of_the_last() -> None:
    transfer = a_transfer()
    transfer.moved(100, 5)
    transfer.moved(50, 7)
    assert (transfer.num_blocks, transfer.num_bytes, transfer.last_block_at_ns) == (2, 150, 7)


def test_every_state_that_nothing_follows_is_reached_by_an_end() -> None:
    assert {end.state for end in TransferEnd} == ENDS


def test_what_the_link_or_its_pools_caused_counts_against_the_link() -> None:
    blameless = {"committed", "engine_lost", "purged", "aborted"}
    assert set(TransferEnd) - LINK_FAULTS == {TransferEnd(value) for value in blameless}


def test_people_read_the_detail_or_else_the_kind() -> None:
    transfer = a_transfer()
    transfer.apply(TransferEnd.PEER_RESTARTED)
    assert transfer.reason == "peer_restarted"
