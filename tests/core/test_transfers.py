"""The transfer table: every state with every event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.transfers import TRANSITIONS, Transfer, TransferEvent, TransferState

ENDS = {
    TransferEvent.COMMIT: TransferState.COMMITTED,
    TransferEvent.ABORT: TransferState.ABORTED,
    TransferEvent.EXPIRE: TransferState.EXPIRED,
}


def a_transfer(state: TransferState = TransferState.OPEN) -> Transfer:
    return Transfer(b"t" * 16, "peer", opened_at_ns=1, deadline_ns=10, state=state)


@pytest.mark.parametrize("state", TransferState)
@pytest.mark.parametrize("event", TransferEvent)
def test_every_pair_does_what_the_table_says(state: TransferState, event: TransferEvent) -> None:
    transfer = a_transfer(state)
    changed = transfer.apply(event, "because")
    if state is TransferState.OPEN:
        assert changed
        assert transfer.state is ENDS[event] is TRANSITIONS[state, event]
        assert transfer.reason == "because"
    else:
        assert not changed
        assert transfer.state is state
        assert transfer.reason == ""
        assert (state, event) not in TRANSITIONS
    assert not transfer.is_open


@given(events=st.lists(st.sampled_from(TransferEvent), min_size=1, max_size=8))
def test_the_first_event_decides_and_only_it_changes_anything(
    events: list[TransferEvent],
) -> None:
    transfer = a_transfer()
    assert transfer.is_open
    changes = [transfer.apply(event, str(number)) for number, event in enumerate(events)]
    assert changes == [True] + [False] * (len(events) - 1)
    assert transfer.state is ENDS[events[0]]
    assert transfer.reason == "0"


def test_blocks_are_counted_with_their_bytes_and_the_time_of_the_last() -> None:
    transfer = a_transfer()
    transfer.moved(100, 5)
    transfer.moved(50, 7)
    assert (transfer.num_blocks, transfer.num_bytes, transfer.last_block_at_ns) == (2, 150, 7)
