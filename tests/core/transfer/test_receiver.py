"""The machine of transfers that arrive: every event in every state, and what it forgets first."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.codec.codecs import SegmentMode
from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.core.transfer import actions as do
from prfaas.core.transfer import events as on
from prfaas.core.transfer.machine import STEPS_MAX
from prfaas.core.transfer.receiver import ACKNOWLEDGE_NS, EARLY_NS, Receiver
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
    PEERS,
    TRANSFERS_MAX,
    granted,
)


class Driver:
    """Carries actions out as a pool does, on a store that is a set."""

    def __init__(self) -> None:
        self.machine = Receiver(TRANSFERS_MAX, 2 * BLOCK_BYTES, GRACE_NS)
        self.now_ns = 1
        self.refusal: TicketRefusal | None = None
        """Why tickets are refused at present."""
        self.failure: TransferEnd | None = None
        """Why blocks are not stored at present."""
        self.leases: dict[Any, int] = {}
        self.came = self.num_let_go = 0
        """Blocks that came, and those that were dealt with."""
        self.ended: list[Transfer] = []
        self.sent: list[do.TransferAction] = []

    def report(self, event: on.TransferInput) -> list[do.TransferAction]:
        actions = self.machine.step(event, self.now_ns)
        for action in actions:
            self.sent.append(action)
            self.execute(action)
        self.machine.validate()
        return actions

    def execute(self, action: do.TransferAction) -> None:
        match action:
            case do.CheckTicket():
                self.report(self.checked(action))
            case do.Keep():
                event: on.BlockCame = action.payload
                if self.failure is None and action.lease_until_ns is not None:
                    self.leases[event.name] = action.lease_until_ns
                ends = action.peer, event.transfer_id
                self.report(stored(*ends, event.name, self.failure))
            case do.Redeliver():
                for came in action.blocks:
                    self.take(came)
            case do.LetGo():
                self.num_let_go += len(action.payloads)
            case do.AskSource() if action.request == "without a link":
                self.report(on.GivenUp("", action.lacking[0].block_hash[:16]))
            case do.EndLeases():
                for name in action.names:
                    self.leases.pop(name, None)
            case do.Ended():
                assert action.transfer.end is not None
                assert not any(one is action.transfer for one in self.ended), "it ends twice"
                self.ended.append(action.transfer)
            case _:
                pass

    def checked(self, action: do.CheckTicket) -> on.TransferInput:
        peer, transfer_id, asker = action.peer, action.transfer_id, action.asker
        if self.refusal is not None:
            return on.NotGranted(peer, transfer_id, reason=self.refusal, asker=asker)
        lacking = action.request if asker is not None else None
        return granted(peer, transfer_id, lacking=lacking, request=lacking, asker=asker)

    def take(self, event: on.BlockCame) -> None:
        """Also of one that is delivered again: its payload is itself."""
        if self.report(event):
            self.num_let_go += 1

    def bring(self, peer: str, transfer_id: bytes, key: BlockKey, **more: Any) -> None:
        event = block(peer, transfer_id, key, **more)
        self.came += 1
        self.take(event)

    @property
    def num_held(self) -> int:
        return sum(len(early.blocks) for early in self.machine._early.values())


class Payload:
    """Knows its event, as the payload of a pool has its block."""

    transfer_id: bytes
    name: Any


def block(peer: str, transfer_id: bytes, key: BlockKey, **more: Any) -> on.BlockCame:
    payload = Payload()
    name = more.pop("layout_id", LAYOUT), key
    payload.transfer_id, payload.name = transfer_id, name
    return on.BlockCame(
        peer, transfer_id, name=name, num_bytes=BLOCK_BYTES, payload=payload, **more
    )


def stored(
    peer: str, transfer_id: bytes, name: BlockName, failure: TransferEnd | None
) -> on.BlockKept:
    return on.BlockKept(peer, transfer_id, name=name, num_bytes=BLOCK_BYTES, failure=failure)


def of_all() -> st.SearchStrategy[tuple[type[on.TransferInput], dict[str, Any]]]:
    """Every kind of event, of either peer or none and of each transfer, at any time."""
    ids, keys, counts = st.sampled_from(IDS), st.sampled_from(KEYS), st.integers(0, 3)
    some_keys = st.lists(keys, max_size=3).map(tuple)
    ends = st.sampled_from(ENDS)
    more: dict[type[on.TransferInput], dict[str, Any]] = {
        on.PullAsked: {
            "request": some_keys,
            "asker": st.just("asker"),
            "is_computed": st.booleans(),
        },
        on.Granted: {},
        on.NotGranted: {"reason": st.just(TicketRefusal.EXPIRED)},
        on.BlockCame: {
            "key": keys,
            "modes": st.sampled_from([frozenset(), frozenset([*SegmentMode][:1])]),
            "layout_id": st.sampled_from([LAYOUT] * 5 + [b"M" * 32]),
        },
        on.BlockKept: {"failure": ends},
        on.CommitCame: {"num_blocks": counts, "missing": some_keys},
        on.AbortCame: {"kind": ends, "reason": st.just("because")},
        on.GivenUp: {"kind": ends, "reason": st.just("because")},
        on.LinkCame: {"resumes": st.lists(ids, max_size=3).map(tuple)},
    }
    return st.sampled_from(on.RECEIVED).flatmap(
        lambda kind: st.tuples(
            st.just(kind),
            st.fixed_dictionaries(
                {
                    "peer": st.sampled_from(PEERS),
                    "transfer_id": ids,
                    "passes_ns": st.sampled_from([0, 0, 0, 1, GRACE_NS, LIFETIME_NS]),
                    "refusal": st.sampled_from([None, None, TicketRefusal.EXPIRED]),
                    "failure": st.sampled_from([None, None, None, TransferEnd.PURGED]),
                }
                | more.get(kind, {})
            ),
        )
    )


def drive(driver: Driver, kind: type[on.TransferInput], given_: dict[str, Any]) -> None:
    more = dict(given_)
    driver.now_ns += more.pop("passes_ns")
    driver.refusal, driver.failure = more.pop("refusal"), more.pop("failure")
    peer, transfer_id = more.pop("peer"), more.pop("transfer_id")
    if kind is on.BlockCame:
        driver.bring(peer, transfer_id, **more)
    elif kind is on.BlockKept:
        # A pool stores within the step; a report of its own only ends something.
        failure = given_["failure"] or TransferEnd.NO_ROOM
        driver.report(stored(peer, transfer_id, (LAYOUT, KEYS[0]), failure))
    elif kind is on.Granted:
        driver.report(granted(peer, transfer_id))
    elif kind is on.GivenUp:
        driver.report(on.GivenUp("", transfer_id, **more))
    else:
        driver.report(kind(peer, transfer_id, **more))


@settings(max_examples=400, deadline=None)
@given(st.lists(of_all(), max_size=40))
def test_every_event_in_every_state_keeps_the_invariants(
    events: list[tuple[type[on.TransferInput], dict[str, Any]]],
) -> None:
    driver = Driver()
    for kind, given_ in events:
        drive(driver, kind, given_)
        assert driver.came == driver.num_let_go + driver.num_held, driver.machine.story.lines()
    # All that is open ends, once; nothing is held, and no lease outlives the last wait.
    driver.now_ns += LIFETIME_NS + EARLY_NS + 1
    driver.report(on.Ticked())
    assert (driver.machine.known.num_open, driver.machine.known.promised_bytes) == (0, 0)
    assert driver.came == driver.num_let_go
    for transfer_id in IDS:
        driver.report(on.Released("", transfer_id))
    assert driver.leases == {}
    assert len(driver.machine.story.lines()) <= STEPS_MAX


def kinds(actions: list[do.TransferAction]) -> list[type[do.TransferAction]]:
    return [type(action) for action in actions]


def test_an_event_of_another_peer_changes_nothing() -> None:
    driver = Driver()
    driver.report(on.Offered("near", IDS[0]))
    driver.bring("near", IDS[0], KEYS[0])
    assert driver.report(on.CommitCame("far", IDS[0], num_blocks=1)) == []
    assert driver.report(on.AbortCame("far", IDS[0], kind=TransferEnd.ABORTED)) == []
    assert driver.report(on.AbortCame("far", IDS[0], kind=TransferEnd.REFUSED, reason="no")) == []
    assert driver.machine.known.is_open(IDS[0])
    assert not driver.machine.known.wants(IDS[0], "far")
    done = driver.report(on.CommitCame("near", IDS[0], num_blocks=1))
    assert kinds(done) == [do.Ended, do.Tell]


def test_blocks_that_overtake_their_offer_wait_for_it_but_not_for_ever() -> None:
    driver = Driver()
    driver.bring("near", IDS[0], KEYS[0])
    driver.bring("near", IDS[1], KEYS[0])
    assert (driver.num_held, driver.num_let_go) == (2, 0)
    driver.report(on.Offered("near", IDS[0]))
    assert (driver.num_held, driver.num_let_go) == (1, 1)
    assert driver.machine.known.has(IDS[0], (LAYOUT, KEYS[0]))
    driver.now_ns += EARLY_NS + 1
    late = driver.report(on.Ticked())
    assert kinds(late)[-3:] == [do.LetGo, do.CountDropped, do.Tell]


def test_too_many_early_blocks_of_a_peer_end_their_transfer() -> None:
    driver = Driver()
    for transfer_id in IDS[:3]:
        driver.bring("near", transfer_id, KEYS[0])
    assert (driver.num_held, driver.num_let_go) == (2, 1)
    assert kinds(driver.report(on.Offered("near", IDS[2]))) == [do.Tell]


def test_the_oldest_end_makes_room_and_what_is_open_stays() -> None:
    driver = Driver()
    for transfer_id in IDS[:3]:
        driver.report(on.Offered("near", transfer_id))
    full = driver.report(on.Offered("near", IDS[3]))
    assert kinds(full) == [do.RecordRefusal, do.Tell]
    for transfer_id in (IDS[1], IDS[0]):
        driver.report(on.GivenUp("", transfer_id))
    driver.report(on.Offered("far", IDS[3]))
    assert driver.machine.known.get(IDS[1]) is None
    assert driver.machine.known.get(IDS[0]) is not None
    assert driver.machine.known.is_open(IDS[2])


def test_refusals_are_of_a_peer_and_the_oldest_go_first() -> None:
    driver = Driver()
    driver.refusal = TicketRefusal.EXPIRED
    for number in range(TRANSFERS_MAX + 1):
        driver.report(on.Offered("near", IDS[number]))
    assert not driver.machine.known.wants(IDS[1], "near")
    assert driver.machine.known.wants(IDS[1], "far")
    assert driver.machine.known.wants(IDS[0], "near")


def test_a_link_that_is_back_in_time_goes_on_with_what_it_resumes() -> None:
    driver = Driver()
    for transfer_id in IDS[:2]:
        driver.report(on.Offered("near", transfer_id))
        driver.bring("near", transfer_id, KEYS[0])
    driver.report(on.LinkBroke("near"))
    driver.now_ns += GRACE_NS - 1
    driver.report(on.Ticked())
    found = driver.report(on.LinkCame("near", resumes=(IDS[1], IDS[3])))
    assert [transfer.transfer_id for transfer in driver.machine.known.open_from("near")] == [IDS[1]]
    assert kinds(found) == [do.EndLeases, do.Ended, do.Acknowledge]
    driver.report(on.LinkBroke("near"))
    driver.now_ns += GRACE_NS
    driver.report(on.Ticked())
    assert driver.machine.known.num_open == 0


def test_blocks_are_acknowledged_together_and_the_last_ones_by_the_commit() -> None:
    """The first one at once, for whoever waits for it; one that nothing follows with the clock."""
    driver = Driver()
    driver.report(on.Offered("near", IDS[0]))
    transfer = driver.machine.known.open[IDS[0]].transfer
    transfer.deadline_ns, transfer.bytes_max = 2 * ACKNOWLEDGE_NS, 3 * BLOCK_BYTES
    for key in KEYS[:2]:
        driver.bring("near", IDS[0], key)
    driver.report(on.Ticked())
    driver.now_ns += ACKNOWLEDGE_NS
    driver.report(on.Ticked())
    driver.bring("near", IDS[0], KEYS[2])
    driver.report(on.CommitCame("near", IDS[0], num_blocks=3))
    told = [one.names for one in driver.sent if isinstance(one, do.Acknowledge)]
    assert told == [((LAYOUT, KEYS[0]),), ((LAYOUT, KEYS[1]),)]
    assert driver.ended[0].num_blocks == 3


def test_the_second_message_of_a_pull_is_repeated_when_the_link_is_back() -> None:
    driver = Driver()
    pull: dict[str, Any] = {"request": tuple(KEYS[:2]), "asker": "asker"}
    assert driver.report(on.PullAsked("near", IDS[0], is_computed=True, **pull)) == []
    driver.report(on.PullAsked("near", IDS[0], **pull))
    assert driver.report(on.PullAsked("near", IDS[0], **pull)) == []
    driver.report(on.PullAsked("near", IDS[0], is_computed=True, **pull))
    found = driver.report(on.LinkCame("near", resumes=(IDS[0],)))
    assert kinds(found) == [do.Tell]
    ended = driver.report(on.CommitCame("near", IDS[0], num_blocks=0, missing=tuple(KEYS)))
    missing, *_ = ended
    assert isinstance(missing, do.Answer)
    assert missing.missing == tuple(KEYS[:2])


def test_the_story_names_the_steps_of_one_transfer_and_counts_repetitions() -> None:
    driver = Driver()
    driver.report(on.Offered("near", IDS[1]))
    for _ in range(100):
        driver.bring("near", IDS[1], KEYS[0])
    driver.report(on.Offered("far", IDS[2]))
    lines = driver.machine.story.lines(IDS[1])
    assert any("BlockCame x99 of near" in line and "accepted" in line for line in lines)
    assert not any(IDS[2].hex()[:12] in line for line in lines)
    assert "refused" not in driver.machine.story.lines(IDS[2])[0]
