"""The codec: any cut of a stream gives the same frames, anything else gives a `PeerError`."""

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import PeerError
from prfaas.wire.frames import (
    CONTROL,
    CONTROL_BYTES_MAX,
    MAGIC,
    VERSION,
    Frame,
    FrameDecoder,
    encode_control,
)


def header(
    length: int, kind: int = CONTROL, magic: bytes = MAGIC, version: int = VERSION, flags: int = 0
) -> bytes:
    return struct.pack(">4sBBHI", magic, version, kind, flags, length)


FRAMES = st.lists(st.builds(Frame, st.binary(min_size=1, max_size=60)), max_size=6)


def encoded(frame: Frame) -> bytes:
    return encode_control(frame.payload)


@given(frames=FRAMES, cuts=st.lists(st.integers(0, 500)))
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


@given(stream=st.binary(max_size=300), step=st.integers(1, 40), prefixed=st.booleans())
def test_arbitrary_bytes_are_refused_cleanly(stream: bytes, step: int, prefixed: bool) -> None:
    decoder, num_bytes = FrameDecoder(control_bytes_max=4096), 0
    stream = (MAGIC + bytes([VERSION]) if prefixed else b"") + stream
    try:
        for start in range(0, len(stream), step):
            for frame in decoder.feed(stream[start : start + step]):
                num_bytes += len(encoded(frame))
    except PeerError:
        pass
    assert num_bytes <= len(stream)


@pytest.mark.parametrize(
    ("bytes_in", "message"),
    [
        (header(1, magic=b"HTTP"), "not a prfaas peer"),
        (header(1, version=VERSION - 1), "version 2 of the peer is too old.* upgrade the peer"),
        (header(1, version=VERSION + 1), "version 4 of the peer is newer.* upgrade this side"),
        (header(1, flags=0x8000), "flags 0x8000"),
        (header(1, kind=3), "kind 3"),
        (header(0), "0 bytes"),
        (header(CONTROL_BYTES_MAX + 1), f"{CONTROL_BYTES_MAX + 1} bytes"),
        (header(2**32 - 1), "limits are"),
    ],
)
def test_a_header_outside_the_protocol_is_refused_with_its_value(
    bytes_in: bytes, message: str
) -> None:
    with pytest.raises(PeerError, match=message):
        FrameDecoder().feed(bytes_in)


def test_limits_are_inclusive() -> None:
    decoder = FrameDecoder(control_bytes_max=8)
    assert decoder.feed(encode_control(b"12345678")) == [Frame(b"12345678")]
    with pytest.raises(PeerError, match="the limits are"):
        FrameDecoder(control_bytes_max=8).feed(encode_control(b"123456789"))


def test_memory_grows_with_what_came_not_with_what_was_announced() -> None:
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        decoder.feed(header(CONTROL_BYTES_MAX))
        decoder.feed(bytes(1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_message_over_the_limit_is_not_encoded() -> None:
    assert encode_control(bytes(CONTROL_BYTES_MAX))
    with pytest.raises(ValueError, match=str(CONTROL_BYTES_MAX)):
        encode_control(bytes(CONTROL_BYTES_MAX + 1))
