"""The machine of the transfers that a pool sends: every event in every state."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.sender import Sender
from prfaas.core.transfer.tickets import TicketRefusal
from prfaas.core.transfer.transfer_state import Transfer, TransferEnd
from tests.core.transfer_parts import (
    BLOCK_BYTES,
    ENDS,
    GRACE_NS,
    IDS,
    KEYS,
    LAYOUT,
    LIFETIME_NS,
    granted,
)

NAMES = [(LAYOUT, key) for key in KEYS]


class Driver:
    """Carries actions out as a link does, and knows what is pinned."""

    def __init__(self) -> None:
        self.machine = Sender("peer", GRACE_NS)
        self.now_ns = 1
        self.pinned: set[tuple[bytes, Any]] = set()
        self.ended: list[Transfer] = []

    def report(self, event: on.TransferInput) -> list[do.TransferAction]:
        actions = self.machine.step(event, self.now_ns)
        for action in actions:
            match action:
                case do.SendBlock():
                    pin = action.block.transfer_id, action.block.name
                    assert pin not in self.pinned, "a block is queued twice"
                    self.pinned.add(pin)
                case do.Landed() | do.Withdraw():
                    self.pinned -= {(action.transfer_id, block.name) for block in action.blocks}
                case do.Ended():
                    assert not any(one is action.transfer for one in self.ended), "it ends twice"
                    self.ended.append(action.transfer)
                case _:
                    assert type(action) in do.SENT
        self.machine.validate()
        held = {(one, name) for one, out in self.machine.open.items() for name in out.blocks}
        assert self.pinned == held
        return actions

    def begin(self, transfer_id: bytes) -> list[do.TransferAction]:
        return self.report(granted("peer", transfer_id, request=b"sealed"))

    def push(self, transfer_id: bytes, key: BlockKey, num_bytes: int = BLOCK_BYTES) -> Any:
        name = LAYOUT, key
        return self.report(on.BlockReady("peer", transfer_id, name=name, num_bytes=num_bytes))


def of_all() -> st.SearchStrategy[tuple[int, on.TransferInput]]:
    """Every kind of event of the sending end, at any time."""
    ids, ends = st.sampled_from(IDS), st.sampled_from(ENDS)
    peer, because = st.just("peer"), st.just("because")
    keys = st.lists(st.sampled_from(KEYS), max_size=3).map(tuple)
    names = st.lists(st.sampled_from(NAMES), max_size=3).map(tuple)
    more: dict[type[on.TransferInput], dict[str, Any]] = {
        on.AbortCame: {"kind": ends, "reason": because},
        on.GivenUp: {"kind": ends, "reason": because},
        on.LinkCame: {"epoch": st.sampled_from(["one", "one", "two"])},
        on.BlockReady: {"name": st.sampled_from(NAMES), "num_bytes": st.sampled_from([10, 10, 30])},
        on.ListClosed: {"missing": keys},
        on.ArrivedCame: {"names": names},
    }

    def of(kind: type[on.TransferInput]) -> st.SearchStrategy[on.TransferInput]:
        if kind is on.Granted:
            return ids.map(lambda one: granted("peer", one, request=b"sealed"))
        return st.builds(kind, peer=peer, transfer_id=ids, **more.get(kind, {}))

    passes_ns = st.sampled_from([0, 0, 0, 0, 1, GRACE_NS, LIFETIME_NS])
    return st.tuples(passes_ns, st.sampled_from(on.SENT).flatmap(of))


@settings(max_examples=400, deadline=None)
@given(st.lists(of_all(), max_size=40))
def test_every_event_in_every_state_keeps_the_invariants(
    events: list[tuple[int, on.TransferInput]],
) -> None:
    driver = Driver()
    driver.report(on.LinkUp("peer"))
    for passes_ns, event in events:
        driver.now_ns += passes_ns
        driver.report(event)
    driver.now_ns += LIFETIME_NS
    driver.report(on.Ticked("peer"))
    assert (driver.machine.open, driver.pinned) == ({}, set())


def kinds(actions: list[do.TransferAction]) -> list[type[do.TransferAction]]:
    return [type(action) for action in actions]


def test_a_link_that_never_was_up_is_not_waited_for() -> None:
    driver = Driver()
    assert kinds(driver.begin(IDS[0])) == [do.Withdraw, do.Ended]
    driver.report(on.LinkUp("peer"))
    assert kinds(driver.begin(IDS[0])) == [do.SendOffer]
    driver.report(on.LinkBroke("peer"))
    assert kinds(driver.begin(IDS[1])) == [do.SendOffer]
    driver.now_ns += GRACE_NS
    given_up = [do.Tell, do.Withdraw, do.Ended]
    assert kinds(driver.report(on.Ticked("peer"))) == 2 * given_up


def test_a_block_beyond_its_ticket_ends_the_transfer_and_is_recorded() -> None:
    driver = Driver()
    driver.report(on.LinkUp("peer"))
    for key, num_bytes, reason in [
        (KEYS[3], 1, TicketRefusal.UNNAMED),
        (KEYS[0], 21, TicketRefusal.OVERSIZED),
    ]:
        driver.begin(IDS[0])
        told, refusal, *ends = driver.push(IDS[0], key, num_bytes)
        assert isinstance(told, do.Tell)
        assert isinstance(refusal, do.RecordRefusal)
        assert (told.kind, refusal.error.reason) == (TransferEnd.REFUSED, reason)
        assert kinds(ends) == [do.Withdraw, do.Ended]


def test_a_link_that_is_back_repeats_offers_and_lists_unless_the_peer_has_lost_its_state() -> None:
    driver = Driver()
    driver.report(on.LinkUp("peer"))
    driver.report(on.LinkCame("peer", epoch="one"))
    for transfer_id in IDS[:2]:
        driver.begin(transfer_id)
        driver.push(transfer_id, KEYS[0])
    assert kinds(driver.report(on.ListClosed("peer", IDS[1]))) == [do.CloseQueue, do.SendCommit]
    again = driver.report(on.LinkCame("peer", epoch="one"))
    assert kinds(again) == [do.SendOffer, do.SendOffer, do.SendCommit]
    lost = driver.report(on.LinkCame("peer", epoch="two"))
    assert [action.kind for action in lost if isinstance(action, do.Tell)] == [
        TransferEnd.PEER_RESTARTED
    ] * 2


def test_a_commit_before_the_list_is_closed_is_a_lie_and_after_it_lets_go_of_all() -> None:
    driver = Driver()
    driver.report(on.LinkUp("peer"))
    driver.begin(IDS[0])
    driver.push(IDS[0], KEYS[0])
    driver.push(IDS[0], KEYS[0])
    assert kinds(driver.report(on.CommittedCame("peer", IDS[0]))) == [do.Distrust]
    driver.report(on.ListClosed("peer", IDS[0]))
    done = driver.report(on.CommittedCame("peer", IDS[0]))
    assert kinds(done) == [do.Landed, do.Withdraw, do.Ended]
    assert driver.report(on.CommittedCame("peer", IDS[0])) == []
