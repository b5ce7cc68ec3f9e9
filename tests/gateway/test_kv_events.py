"""vLLM's events, decoded: every encoding, unknown and hostile ones."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import PeerError
from prfaas.wire.kv_events import decode_batch

from .kv_publisher import CLEARED, removed, stored

ONE, TWO = b"\x01" * 32, b"\x02" * 32


def encoded(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def as_array(event: dict[str, Any]) -> list[Any]:
    """As vLLM up to 0.11 had it, with the fields that came later behind."""
    match event["type"]:
        case "BlockStored":
            names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"]
            names += ["medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"]
        case "BlockRemoved":
            names = ["block_hashes", "medium", "group_idx"]
        case _:
            names = []
    return [event["type"], *(event.get(name) for name in names)]


EVENTS = [stored([ONE, TWO], 1), removed([ONE], 1), stored([7, 2**64 - 1], None, None)]


@pytest.mark.parametrize(
    "payload",
    [
        encoded(*EVENTS),
        encoded(*map(as_array, EVENTS)),
        encoded(EVENTS[0], as_array(EVENTS[1]), EVENTS[2]),
        msgspec.msgpack.encode({"ts": 1.5, "events": EVENTS, "data_parallel_rank": None}),
        msgspec.msgpack.encode({"events": [as_array(event) for event in EVENTS], "more": [1]}),
        msgspec.msgpack.encode([1.5, EVENTS]),
        msgspec.msgpack.encode([1.5, EVENTS, 3, "more"]),
        encoded(*[event | {"session_id": "s", "unheard_of": {"x": [1]}} for event in EVENTS]),
    ],
)
def test_every_encoding_says_the_same(payload: bytes) -> None:
    batch = decode_batch(payload)
    assert batch.hashes == [ONE, TWO, ONE, 7, 2**64 - 1]
    assert batch.runs == [(2, True, 1), (1, False, 1), (2, True, 0)]
    assert (batch.num_events, batch.num_elsewhere, batch.num_unknown) == (3, 0, 0)


def test_an_old_array_without_the_later_fields() -> None:
    batch = decode_batch(
        encoded(["BlockStored", [ONE], None, [1], 16, None], ["BlockRemoved", [TWO]])
    )
    assert batch.runs == [(1, True, 0), (1, False, 0)]


def test_what_came_before_a_clearing_is_left_out() -> None:
    for clear in (CLEARED, ["AllBlocksCleared"]):
        batch = decode_batch(encoded(stored([ONE]), clear, stored([TWO])))
        assert batch.cleared
        assert batch.hashes == [TWO]


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "CPU_PINNED", "DISK", "EXTERNAL", "new"])
def test_other_media_are_counted_and_left_out(medium: str) -> None:
    batch = decode_batch(encoded(stored([ONE], medium=medium), removed([TWO])))
    assert (batch.runs, batch.num_elsewhere) == ([(1, False, 0)], 1)


def test_what_a_peer_of_the_engine_holds_is_left_out() -> None:
    batch = decode_batch(encoded(stored([ONE]) | {"locality": "REMOTE"}))
    assert (batch.hashes, batch.num_elsewhere) == ([], 1)


@pytest.mark.parametrize(
    "strange", [{"type": "BlockMoved", "block_hashes": 3}, ["Renamed", 1], {"no": "type"}, []]
)
def test_unknown_kinds_are_counted_and_tolerated(strange: Any) -> None:
    batch = decode_batch(encoded(stored([ONE]), strange, as_array(removed([TWO]))))
    assert batch.runs == [(1, True, 0), (1, False, 0)]
    assert (batch.num_events, batch.num_unknown) == (3, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xff" * 9,
        encoded(stored([ONE])) + b"x",
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode("events"),
        encoded(3),
        encoded(stored([b"short"])),
        encoded(stored(["text"])),
        encoded(stored([1.5])),
        encoded(stored([ONE], -1)),
        encoded(stored([ONE], 2**40)),
        encoded({"type": "BlockRemoved"}),
        encoded(stored(list(range(70_000)))),
        encoded(stored([ONE], medium="x" * 1000)),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(PeerError):
        decode_batch(payload)


@given(st.binary(max_size=200))
def test_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except PeerError:
        return
    assert sum(count for count, _, _ in batch.runs) == len(batch.hashes)


@given(st.data())
def test_a_damaged_batch_is_a_batch_or_refused(data: st.DataObject) -> None:
    whole = bytearray(encoded(*EVENTS, CLEARED, ["Renamed"], as_array(EVENTS[0])))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
        whole[at] = data.draw(st.integers(0, 255))
    try:
        decode_batch(bytes(whole))
    except PeerError:
        return
