"""Order, gaps, replays and lives of an engine, without sockets: the index is the engine's cache."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.errors import PeerError
from prfaas.gateway.engines.kv_event_stream import BatchResult, EngineFeed, read_frames
from tests.gateway.conftest import LAYOUT
from tests.gateway.kv_publisher import CLEARED, removed, stored

HASHES = [bytes([n]) * 32 for n in range(8)]
EXACT, INCOMPLETE, DEGRADED = SourceState.EXACT, SourceState.INCOMPLETE, SourceState.DEGRADED


class Life:
    """Events of one run of an engine."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.batches: list[bytes] = []
        self.held: set[bytes] = set()

    def publish(self, added: list[bytes], gone: list[bytes], *, clear: bool = False) -> None:
        events = [CLEARED] if clear else []
        events += [stored(added), removed(gone)]
        self.held = (set() if clear else self.held) | set(added)
        self.held -= set(gone)
        stamp = self.number * 1000 + len(self.batches)
        self.batches.append(msgspec.msgpack.encode([float(stamp), events, 0]))


class Follower:
    """A feed, its index, and the I/O around it in short."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.feed = EngineFeed("e", self.index)

    def replay(self, life: Life, oldest: int = 0) -> None:
        self.feed.begin_replay()
        for seq in range(max(oldest, self.feed.replay_from), len(life.batches)):
            self.feed.replayed(seq, life.batches[seq])
        if not self.feed.end_replay():
            self.replay(life, oldest)

    def join(self, life: Life, oldest: int = 0) -> None:
        self.feed.connected(LAYOUT)
        self.replay(life, oldest)

    def hear(self, life: Life, seq: int, oldest: int = 0) -> None:
        if self.feed.live(seq, life.batches[seq]) is BatchResult.GAP:
            self.replay(life, oldest)
            if self.feed.live(seq, life.batches[seq]) is BatchResult.GAP:
                self.feed.start_blind()
                self.feed.live(seq, life.batches[seq])

    def held(self) -> set[bytes]:
        (group, _) = LAYOUT.groups
        return {
            name
            for name in HASHES
            if self.index.num_held("e", LAYOUT, group, [name], 7)  # type: ignore[arg-type]
        }


def a_life(number: int = 0) -> Life:
    life = Life(number)
    life.publish(HASHES[:3], [])
    life.publish(HASHES[3:5], HASHES[:1])
    return life


def test_the_whole_history_is_exact() -> None:
    life, follower = a_life(), Follower()
    follower.join(life)
    assert (follower.feed.state, follower.held()) == (EXACT, life.held)
    life.publish([HASHES[6]], [HASHES[1]])
    follower.hear(life, 2)
    assert (follower.feed.state, follower.held()) == (EXACT, life.held)


def test_an_engine_that_published_nothing_is_exact() -> None:
    life, follower = Life(), Follower()
    follower.join(life)
    assert (follower.feed.state, follower.held()) == (EXACT, set())
    life.publish(HASHES[:2], [])
    follower.hear(life, 0)
    assert (follower.feed.state, follower.held()) == (EXACT, life.held)


def test_the_end_of_a_history_is_known_in_part() -> None:
    life, follower = a_life(), Follower()
    follower.join(life, oldest=1)
    assert (follower.feed.state, follower.held()) == (INCOMPLETE, set(HASHES[3:5]))
    life.publish([HASHES[6]], [], clear=True)
    follower.hear(life, 2)
    assert (follower.feed.state, follower.held()) == (EXACT, life.held)


def test_what_overlaps_with_the_replay_is_not_applied_twice() -> None:
    life, follower = a_life(), Follower()
    life.publish([], HASHES[3:5])
    follower.join(life)
    for seq in range(3):
        assert follower.feed.live(seq, life.batches[seq]) is BatchResult.KNOWN
    assert follower.held() == life.held


def test_a_gap_is_replayed() -> None:
    life, follower = a_life(), Follower()
    follower.join(life)
    for _ in range(3):
        life.publish([HASHES[7]], [HASHES[2]])
    follower.hear(life, 4)
    assert (follower.feed.state, follower.held()) == (EXACT, life.held)


def test_a_gap_that_can_not_be_replayed_leaves_what_came_since() -> None:
    life, follower = a_life(), Follower()
    follower.join(life)
    life.publish([], HASHES)
    life.publish([HASHES[7]], [])
    follower.hear(life, 3, oldest=3)
    assert (follower.feed.state, follower.held()) == (INCOMPLETE, {HASHES[7]})


def test_a_broken_connection_is_taken_up_where_it_broke() -> None:
    life, follower = a_life(), Follower()
    follower.join(life)
    follower.feed.lost()
    assert (follower.feed.state, follower.held()) == (DEGRADED, life.held)
    life.publish([HASHES[7]], [HASHES[2]])
    follower.join(life)
    assert (follower.feed.state, follower.held()) == (EXACT, life.held)


@pytest.mark.parametrize("num_batches", [0, 1, 2, 3, 6])
def test_another_life_is_never_taken_for_the_same(num_batches: int) -> None:
    """However far it has counted when it is seen."""
    follower = Follower()
    follower.join(a_life())
    follower.feed.lost()
    other = Life(1)
    for n in range(num_batches):
        other.publish([HASHES[n]], [])
    follower.join(other)
    assert (follower.feed.state, follower.held()) == (EXACT, other.held)


def test_another_life_behind_a_proxy_is_noticed() -> None:
    life, follower = a_life(), Follower()
    follower.join(life)
    life.publish([HASHES[7]], [])
    follower.hear(life, 2)
    other = Life(1)
    other.publish([HASHES[5]], [])
    follower.hear(other, 0)
    assert (follower.feed.state, follower.held()) == (EXACT, {HASHES[5]})


def test_without_a_replay_what_comes_is_known() -> None:
    life, follower = a_life(), Follower()
    follower.feed.connected(LAYOUT)
    follower.feed.start_blind()
    follower.hear(life, 1)
    assert (follower.feed.state, follower.held()) == (INCOMPLETE, set(HASHES[3:5]))
    follower.feed.start_blind()
    follower.hear(life, 0)
    assert (follower.feed.state, follower.held()) == (EXACT, set(HASHES[:3]))


def test_a_batch_that_can_not_be_read_changes_nothing() -> None:
    life, follower = a_life(), Follower()
    follower.join(life)
    with pytest.raises(PeerError):
        follower.feed.live(2, b"\xc1")
    assert follower.held() == life.held


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"1234567", b""], [b"", b"123456789", b""]])
def test_frames_that_are_no_batch(frames: list[bytes]) -> None:
    with pytest.raises(PeerError):
        read_frames(frames)


def test_frames_of_old_and_new_replays() -> None:
    number, end = (7).to_bytes(8, "big"), (-1).to_bytes(8, "big", signed=True)
    assert read_frames([b"topic", number, b"x"]) == (7, b"x")
    assert read_frames([b"", b"topic", number, b"x"]) == (7, b"x")
    assert read_frames([b"", number, b"x"]) == (7, b"x")
    assert read_frames([b"", end, b""])[0] == -1


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"),
            st.lists(st.sampled_from(HASHES), max_size=3),
            st.lists(st.sampled_from(HASHES), max_size=3),
            st.booleans(),
        ),
        st.tuples(st.sampled_from(["lose", "break", "restart", "forget"])),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_block_is_known_that_is_not_held(steps: list[tuple[object, ...]]) -> None:
    """Batches get lost, connections break, engines begin anew, old batches are forgotten."""
    life, follower, oldest = Life(), Follower(), 0
    follower.join(life)
    for name, *rest in steps:
        match name:
            case "publish":
                added, gone, clear = rest
                life.publish(added, gone, clear=clear)  # type: ignore[arg-type]
                follower.hear(life, len(life.batches) - 1, oldest)
                if follower.feed.state is EXACT:
                    assert follower.held() == life.held
                assert follower.held() <= life.held
            case "lose":
                life.publish([HASHES[0]], [HASHES[1]])
            case "break":
                follower.feed.lost()
                follower.join(life, oldest)
            case "restart":
                life, oldest = Life(life.number + 1), 0
                follower.feed.lost()
                follower.join(life)
                assert (follower.feed.state, follower.held()) == (EXACT, life.held)
            case "forget":
                oldest = len(life.batches)
