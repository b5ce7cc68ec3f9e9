"""Fragments on the wire: a round trip, and nothing but a `PeerError` for anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.blocks import BlockKey
from prfaas.core.link_share import Fragment, OutgoingBlock
from prfaas.errors import PeerError
from prfaas.wire.fragments import (
    FRAGMENT_BYTES_MAX,
    PREFIX_BYTES,
    FragmentPrefix,
    decode_prefix,
    encode_prefix,
)

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
