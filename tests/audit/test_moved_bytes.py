"""Bytes by transfer: each byte that was added is taken out once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.audit.pool_audit import MovedBytes, TransferBytes
from prfaas.core.audit.refusals import EACH_MAX, KEYS_MAX, WINDOW_NS, RefusalCounts

IDS = [bytes([number]) * 16 for number in range(5)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "take", "sweep"]),
        st.sampled_from(["sent", "received"]),
        st.sampled_from(IDS),
        st.integers(1, 1000),
    ),
    max_size=60,
)


def nothing_is_open(_direction: str, _transfer: bytes) -> bool:
    return False


def sums(found: list[TransferBytes]) -> tuple[int, int]:
    return sum(each.link_bytes for each in found), sum(each.wire_bytes for each in found)


@given(STEPS, st.booleans())
def test_no_byte_is_lost_and_none_counts_twice(
    steps: list[tuple[str, str, bytes, int]], is_open: bool
) -> None:
    moved, found, added = MovedBytes(), list[TransferBytes](), 0
    for step, direction, transfer, count in steps:
        match step:
            case "add":
                moved.add(direction, "peer", transfer, link_bytes=count, wire_bytes=2 * count)
                added += count
            case "take":
                found.append(moved.take(direction, "peer", transfer))
            case "sweep":
                found += moved.sweep(lambda *_: is_open)
    found += moved.take_all()

    assert sums(found) == (added, 2 * added)


def test_bytes_are_late_only_if_two_sweeps_find_them_without_a_transfer() -> None:
    """A fragment may overtake the offer of its transfer."""
    moved = MovedBytes()
    moved.add("received", "peer", IDS[0], wire_bytes=5)

    assert moved.sweep(nothing_is_open) == []
    assert moved.sweep(lambda *_: True) == []
    assert moved.sweep(nothing_is_open) == []
    assert moved.sweep(nothing_is_open) == [TransferBytes("received", "peer", IDS[0], 0, 5)]


@pytest.mark.parametrize("sweeps", [lambda m: [m.take_all()], lambda m: [m.sweep(nothing_is_open)]])
def test_a_peer_that_invents_transfers_takes_no_memory(
    sweeps: Callable[[MovedBytes], list[list[TransferBytes]]],
) -> None:
    moved = MovedBytes(entries_max=300)
    for number in range(1000):
        moved.add("received", "peer", number.to_bytes(16, "big"), wire_bytes=3)
    moved.sweep(nothing_is_open)
    (found,) = sweeps(moved)

    assert len(found) <= 301
    assert sums(found) == (0, 3000)


@given(st.lists(st.integers(0, 3 * KEYS_MAX), max_size=400))
def test_every_refusal_is_a_record_or_in_a_count(numbers: list[int]) -> None:
    counts = RefusalCounts()
    records = sum(counts.take((str(number),), 0) for number in numbers)
    early, late = counts.counted(WINDOW_NS - 1), counts.counted(WINDOW_NS)

    assert early == []
    assert records + sum(count for _, count in late) == len(numbers)
    assert len(late) <= KEYS_MAX + 1
    assert records <= KEYS_MAX * EACH_MAX
    assert counts.counted(2 * WINDOW_NS, is_end=True) == []
