"""Fragments of blocks, as they travel over the data connections of a link. No I/O.

After its `Join` a data connection carries nothing but fragments:

    magic "PFKV" | version u8 | kind u8 (3) | flags u16 (zero) | payload length u32
    transfer id 16 | layout id 32 | group u32 | block hash 32 | digest 32 | block bytes u32 | offset u32
    bytes

The digest is that of the whole block and covers its name.
"""  # noqa: E501 - one line a part

from __future__ import annotations

import struct
from dataclasses import dataclass

from prfaas.core.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey
from prfaas.core.link_share import Fragment
from prfaas.errors import PeerError
from prfaas.wire.frames import BLOCK_BYTES_MAX, MAGIC, TRANSFER_ID_BYTES, VERSION

FRAGMENT = 3
FRAGMENT_BYTES_MAX = 1 << 20
_PREFIX = struct.Struct(f">4sBBHI{TRANSFER_ID_BYTES}s{LAYOUT_ID_BYTES}sI{HASH_BYTES}s32sII")
_HEADER_BYTES = 12
PREFIX_BYTES = _PREFIX.size


@dataclass(frozen=True, slots=True)
class FragmentPrefix:
    """What goes before the bytes of a fragment."""

    transfer_id: bytes
    layout_id: bytes
    key: BlockKey
    digest: bytes
    block_bytes: int
    offset: int
    num_bytes: int


def encode_prefix(fragment: Fragment) -> bytes:
    """What goes before the bytes of a fragment of at most FRAGMENT_BYTES_MAX."""
    block = fragment.block
    layout_id, key = block.name
    return _PREFIX.pack(
        MAGIC,
        VERSION,
        FRAGMENT,
        0,
        PREFIX_BYTES - _HEADER_BYTES + fragment.num_bytes,
        block.transfer_id,
        layout_id,
        key.group,
        key.block_hash,
        block.digest,
        len(block.data),
        fragment.offset,
    )


def decode_prefix(data: bytes | bytearray | memoryview) -> FragmentPrefix:
    """What the next bytes of a data connection are.

    Args:
        data: PREFIX_BYTES bytes.

    Raises:
        PeerError: They start no fragment, or one over a limit.
    """
    (
        magic,
        version,
        kind,
        flags,
        length,
        transfer_id,
        layout_id,
        group,
        block_hash,
        digest,
        size,
        at,
    ) = _PREFIX.unpack(data)
    if (magic, version, kind, flags) != (MAGIC, VERSION, FRAGMENT, 0):
        raise PeerError(
            f"no fragment of version {VERSION}: {magic!r}, version {version}, kind {kind}, "
            f"flags {flags:#06x}"
        )
    num_bytes = length - (PREFIX_BYTES - _HEADER_BYTES)
    if not 1 <= num_bytes <= FRAGMENT_BYTES_MAX:
        raise PeerError(f"fragment of {num_bytes} bytes; the limits are 1 to {FRAGMENT_BYTES_MAX}")
    if not at + num_bytes <= size <= BLOCK_BYTES_MAX:
        raise PeerError(
            f"fragment of {num_bytes} bytes at {at} of a block of {size}; "
            f"the limit of a block is {BLOCK_BYTES_MAX}"
        )
    key = BlockKey(group, block_hash)
    return FragmentPrefix(transfer_id, layout_id, key, digest, size, at, num_bytes)
