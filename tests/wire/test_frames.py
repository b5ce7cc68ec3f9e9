"""The codec: any cut of a stream gives the same frames, anything else gives a `PeerError`."""

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.blocks import BlockKey
from prfaas.errors import PeerError
from prfaas.wire.frames import (
    BLOCK,
    BLOCK_BYTES_MAX,
    CONTROL,
    CONTROL_BYTES_MAX,
    MAGIC,
    VERSION,
    BlockFrame,
    ControlFrame,
    Frame,
    FrameDecoder,
    block_digest,
    encode_block_header,
    encode_control,
)

BLOCK_HEADER_BYTES = 16 + 32 + 4 + 32 + 32


def a_block(data: bytes, *, group: int = 1, block_hash: bytes = b"h" * 32) -> BlockFrame:
    key = BlockKey(group, block_hash)
    digest = block_digest(b"L" * 32, key, data)
    return BlockFrame(b"t" * 16, b"L" * 32, key, digest, bytearray(data))


def encoded(frame: Frame) -> bytes:
    if isinstance(frame, ControlFrame):
        return encode_control(frame.payload)
    header = encode_block_header(
        frame.transfer_id, frame.layout_id, frame.key, frame.digest, len(frame.data)
    )
    return header + bytes(frame.data)


def header(
    length: int, kind: int = CONTROL, magic: bytes = MAGIC, version: int = VERSION, flags: int = 0
) -> bytes:
    return struct.pack(">4sBBHI", magic, version, kind, flags, length)


CONTROLS = st.builds(ControlFrame, st.binary(min_size=1, max_size=60))
BLOCKS = st.builds(
    a_block,
    st.binary(min_size=1, max_size=60),
    group=st.integers(0, 2**32 - 1),
    block_hash=st.binary(min_size=32, max_size=32),
)
FRAMES = st.lists(st.one_of(CONTROLS, BLOCKS), max_size=6)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 1500)))
def test_any_cut_of_the_stream_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encoded, frames))
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    decoder = FrameDecoder()
    pieces = [stream[a:b] for a, b in itertools.pairwise(places)]
    assert [frame for piece in pieces for frame in decoder.feed(piece)] == frames


@given(frames=FRAMES)
def test_byte_by_byte_every_frame_comes_with_its_last_byte(frames: list[Frame]) -> None:
    decoder = FrameDecoder()
    for frame in frames:
        *most, last = (bytes([byte]) for byte in encoded(frame))
        assert [got for byte in most for got in decoder.feed(byte)] == []
        assert decoder.feed(last) == [frame]


def feed_all(stream: bytes, step: int) -> list[Frame]:
    """What comes of a hostile stream: frames, or a `PeerError` and nothing else."""
    decoder = FrameDecoder(control_bytes_max=4096, block_bytes_max=4096)
    frames: list[Frame] = []
    try:
        for start in range(0, len(stream), step):
            frames += decoder.feed(stream[start : start + step])
    except PeerError:
        pass
    return frames


@given(stream=st.binary(max_size=300), step=st.integers(1, 40), prefixed=st.booleans())
def test_arbitrary_bytes_are_refused_cleanly(stream: bytes, step: int, prefixed: bool) -> None:
    start = MAGIC + bytes([VERSION]) if prefixed else b""
    for frame in feed_all(start + stream, step):
        assert not isinstance(frame, BlockFrame) or not frame.is_intact


@given(
    frames=st.lists(st.one_of(CONTROLS, BLOCKS), min_size=1, max_size=4),
    place=st.integers(0, 10_000),
    byte=st.integers(1, 255),
    step=st.integers(1, 64),
)
def test_a_flipped_byte_never_becomes_another_intact_block(
    frames: list[Frame], place: int, byte: int, step: int
) -> None:
    stream = bytearray(b"".join(map(encoded, frames)))
    stream[place % len(stream)] ^= byte
    sent = {(f.layout_id, f.key, bytes(f.data)) for f in frames if isinstance(f, BlockFrame)}
    for frame in feed_all(bytes(stream), step):
        if isinstance(frame, BlockFrame) and frame.is_intact:
            assert (frame.layout_id, frame.key, bytes(frame.data)) in sent


@given(
    frames=st.lists(BLOCKS, min_size=1, max_size=3),
    start=st.integers(0, 2000),
    length=st.integers(1, 200),
    inserted=st.binary(max_size=50),
)
def test_lost_and_inserted_bytes_never_become_another_intact_block(
    frames: list[Frame], start: int, length: int, inserted: bytes
) -> None:
    stream = b"".join(map(encoded, frames))
    start %= len(stream)
    sent = {(f.layout_id, f.key, bytes(f.data)) for f in frames if isinstance(f, BlockFrame)}
    for frame in feed_all(stream[:start] + inserted + stream[start + length :], 64):
        if isinstance(frame, BlockFrame) and frame.is_intact:
            assert (frame.layout_id, frame.key, bytes(frame.data)) in sent


@pytest.mark.parametrize(
    ("bytes_in", "message"),
    [
        (header(1, magic=b"HTTP"), "not a prfaas peer"),
        (header(1, version=2), "version 2"),
        (header(1, flags=0x8000), "flags 0x8000"),
        (header(1, kind=3), "kind 3"),
        (header(0), "0 bytes"),
        (header(CONTROL_BYTES_MAX + 1), f"{CONTROL_BYTES_MAX + 1} bytes"),
        (header(BLOCK_HEADER_BYTES, kind=BLOCK), f"{BLOCK_HEADER_BYTES} bytes"),
        (header(BLOCK_HEADER_BYTES + BLOCK_BYTES_MAX + 1, kind=BLOCK), "limits are"),
        (header(2**32 - 1, kind=BLOCK), "limits are"),
    ],
)
def test_a_header_outside_the_protocol_is_refused_with_its_value(
    bytes_in: bytes, message: str
) -> None:
    with pytest.raises(PeerError, match=message):
        FrameDecoder().feed(bytes_in)


def test_limits_are_inclusive() -> None:
    decoder = FrameDecoder(control_bytes_max=8, block_bytes_max=8)
    whole: list[Frame] = [ControlFrame(b"12345678"), a_block(b"12345678"), a_block(b"1")]
    assert decoder.feed(b"".join(map(encoded, whole))) == whole
    for larger in (ControlFrame(b"123456789"), a_block(b"123456789")):
        with pytest.raises(PeerError, match="the limits are"):
            FrameDecoder(control_bytes_max=8, block_bytes_max=8).feed(encoded(larger))


def test_memory_grows_with_what_came_not_with_what_was_announced() -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        decoder.feed(header(BLOCK_HEADER_BYTES + BLOCK_BYTES_MAX, kind=BLOCK))
        decoder.feed(bytes(BLOCK_HEADER_BYTES + 1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_message_over_the_limit_is_not_encoded() -> None:
    assert encode_control(bytes(CONTROL_BYTES_MAX))
    with pytest.raises(ValueError, match=str(CONTROL_BYTES_MAX)):
        encode_control(bytes(CONTROL_BYTES_MAX + 1))


@given(
    frame=BLOCKS,
    other=st.sampled_from(["layout", "group", "hash", "longer", "shorter", "flipped"]),
)
def test_a_block_under_another_name_or_with_other_bytes_is_not_intact(
    frame: BlockFrame, other: str
) -> None:
    assert frame.is_intact
    layout_id, (group, block_hash), data = frame.layout_id, frame.key, bytes(frame.data)
    match other:
        case "layout":
            layout_id = b"M" * 32
        case "group":
            group = (group + 1) % 2**32
        case "hash":
            block_hash = bytes([block_hash[0] ^ 1]) + block_hash[1:]
        case "longer":
            data += b"\0"
        case "shorter":
            data = data[:-1]
        case "flipped":
            data = bytes([data[0] ^ 1]) + data[1:]
    key = BlockKey(group, block_hash)
    assert not BlockFrame(
        frame.transfer_id, layout_id, key, frame.digest, bytearray(data)
    ).is_intact
