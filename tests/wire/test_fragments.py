"""Fragments on the wire: a round trip, and nothing but a `PeerError` for anything else."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    PREFIX_BYTES,
    FragmentPrefix,
    FragmentStream,
    ReceivedBlock,
    block_digest,
    decode_prefix,
    encode_prefix,
)
from tests.wire.feeding import write_to

DATA = bytes(range(256)) * 8
BLOCK = OutgoingBlock(b"t" * 16, (b"L" * 32, BlockKey(3, b"h" * 32)), b"d" * 32, DATA)


def encoded(offset: int = 100, num_bytes: int = 50) -> bytearray:
    fragment = Fragment(BLOCK, offset, num_bytes)
    return bytearray(encode_prefix(fragment) + fragment.data)


def test_a_fragment_survives_the_trip() -> None:
    wire = encoded()
    assert decode_prefix(wire[:PREFIX_BYTES]) == FragmentPrefix(
        b"t" * 16, b"L" * 32, BlockKey(3, b"h" * 32), b"d" * 32, len(DATA), 100, 50
    )
    assert wire[PREFIX_BYTES:] == DATA[100:150]


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_noise_is_a_peer_error(noise: bytes) -> None:
    with pytest.raises(PeerError):
        decode_prefix(noise)


@given(st.integers(0, PREFIX_BYTES - 1), st.integers(0, 255))
def test_a_damaged_prefix_is_a_peer_error_or_within_the_limits(at: int, value: int) -> None:
    wire = encoded()[:PREFIX_BYTES]
    wire[at] = value
    try:
        prefix = decode_prefix(wire)
    except PeerError:
        return
    assert 1 <= prefix.num_bytes <= FRAGMENT_BYTES_MAX
    assert prefix.offset + prefix.num_bytes <= prefix.block_bytes


class Blocks:
    """Targets of fragments: blocks by name, size and digest."""

    def __init__(self) -> None:
        self.made: dict[tuple[bytes, bytes, BlockKey, bytes, int], bytearray] = {}

    def place(self, prefix: FragmentPrefix) -> memoryview:
        block = self.made.setdefault(
            (
                prefix.transfer_id,
                prefix.layout_id,
                prefix.key,
                prefix.digest,
                min(prefix.block_bytes, 10_000),
            ),
            bytearray(min(prefix.offset + FRAGMENT_BYTES_MAX, prefix.block_bytes)),
        )
        return memoryview(block)[prefix.offset : prefix.offset + prefix.num_bytes]

    def intact(self) -> set[tuple[bytes, BlockKey, bytes]]:
        """Layout, key and bytes of the blocks that are what they say they are."""
        blocks = (ReceivedBlock(*name[:4], data) for name, data in self.made.items())
        return {(b.layout_id, b.key, bytes(b.data)) for b in blocks if b.is_intact}


def a_block(data: bytes, group: int, block_hash: bytes) -> OutgoingBlock:
    key = BlockKey(group, block_hash)
    return OutgoingBlock(b"t" * 16, (b"L" * 32, key), block_digest(b"L" * 32, key, data), data)


BLOCKS = st.lists(
    st.builds(
        a_block,
        st.binary(min_size=1, max_size=60),
        st.integers(0, 2**32 - 1),
        st.binary(min_size=32, max_size=32),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda block: block.name,
)


def stream_of(blocks: list[OutgoingBlock], step: int) -> bytes:
    fragments = [
        Fragment(block, at, min(step, len(block.data) - at))
        for block in blocks
        for at in range(0, len(block.data), step)
    ]
    return b"".join(encode_prefix(fragment) + fragment.data for fragment in fragments)


def names(blocks: list[OutgoingBlock]) -> set[tuple[bytes, BlockKey, bytes]]:
    return {(*block.name, bytes(block.data)) for block in blocks}


@given(blocks=BLOCKS, step=st.integers(1, 30), cuts=st.lists(st.integers(0, 2000)))
def test_any_cut_of_the_stream_gives_the_same_blocks(
    blocks: list[OutgoingBlock], step: int, cuts: list[int]
) -> None:
    stream, here = stream_of(blocks, step), Blocks()
    reader = FragmentStream(here.place)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    done = [got for a, b in itertools.pairwise(places) for got in write_to(reader, stream[a:b])]
    assert len(done) == sum(-(-len(block.data) // step) for block in blocks)
    assert here.intact() == names(blocks)


@given(
    blocks=BLOCKS,
    start=st.integers(0, 2000),
    length=st.integers(0, 200),
    inserted=st.binary(max_size=50),
    flipped=st.integers(0, 255),
)
def test_a_damaged_stream_gives_no_other_intact_block(
    blocks: list[OutgoingBlock], start: int, length: int, inserted: bytes, flipped: int
) -> None:
    stream, here = bytearray(stream_of(blocks, 30)), Blocks()
    start %= len(stream)
    stream[start] ^= flipped
    with contextlib.suppress(PeerError):
        write_to(FragmentStream(here.place), stream[:start] + inserted + stream[start + length :])
    assert here.intact() <= names(blocks)


@given(
    block=BLOCKS.map(lambda blocks: blocks[0]),
    other=st.sampled_from(["layout", "group", "hash", "longer", "shorter", "flipped"]),
)
def test_a_block_under_another_name_or_with_other_bytes_is_not_intact(
    block: OutgoingBlock, other: str
) -> None:
    (layout_id, (group, block_hash)), data = block.name, bytes(block.data)
    assert ReceivedBlock(
        b"t" * 16, layout_id, BlockKey(group, block_hash), block.digest, bytearray(data)
    ).is_intact
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
    assert not ReceivedBlock(b"t" * 16, layout_id, key, block.digest, bytearray(data)).is_intact
