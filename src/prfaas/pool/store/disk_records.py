"""Records of the disk tier: the header of a block, in a segment.

    record   magic "PFKVREC2" | layout id 32 | group u32 | block hash 32 | length u64 | digest 32
             | origin length u16 | check 8 (of all before, and the origin) | origin | block bytes
             | zeros up to the next multiple

The magic "PFKVGON2" makes a record one that was dropped.

In a sealed folder the digest is zero, a stamp (`keys/record_seals.py`) follows the origin, and the
block is followed by its tag ("PFKVREC3", "PFKVGON3"). All of the header, the number of the segment
and the offset are bound to the block. A sealed folder also has `keyring`, the keys of tenants. A
record without its key is as one that was dropped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import blake3

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey, BlockName
from prfaas.pool.keys.record_seals import STAMP_BYTES, TAG_BYTES
from prfaas.pool.store.origins import ORIGIN_BYTES_MAX, SHARED_MAX, origin_bytes, origin_in
from prfaas.wire.fragments import BLOCK_BYTES_MAX

MAGIC, MAGIC_GONE = b"PFKVREC2", b"PFKVGON2"
MAGIC_SEALED, MAGIC_GONE_SEALED = b"PFKVREC3", b"PFKVGON3"
ALIGN_BYTES = 4096
CHECK_BYTES = 8
_HEADER = struct.Struct(f">8s{LAYOUT_ID_BYTES}sI{HASH_BYTES}sQ32s")
_ORIGIN = struct.Struct(">H")
PLACE = struct.Struct(">QQ")
_FIXED_BYTES = _HEADER.size + _ORIGIN.size + CHECK_BYTES
HEADER_BYTES_MAX = _FIXED_BYTES + ORIGIN_BYTES_MAX + STAMP_BYTES


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Place of a block.

    Attributes:
        segment: Number of the file.
        offset: Of the record, bytes.
        origin: Where it came from.
        head_bytes: Size of the header of its record.
        key_id: Name of the key that it is sealed with; empty if it is in the clear.
    """

    segment: int
    offset: int
    num_bytes: int
    origin: Origin
    head_bytes: int
    key_id: bytes = b""

    @property
    def stored_bytes(self) -> int:
        """Bytes after the header: the block, and its tag if it is sealed."""
        return self.num_bytes + (TAG_BYTES if self.key_id else 0)

    @property
    def record_bytes(self) -> int:
        """Bytes of disk that its record takes."""
        return _aligned(self.head_bytes + self.stored_bytes)


class Header(NamedTuple):
    """Header of a record."""

    name: BlockName
    num_bytes: int
    digest: bytes
    origin: Origin
    head_bytes: int
    is_gone: bool
    stamp: bytes = b""


def record_bytes(num_bytes: int, origin: Origin, *, is_sealed: bool = False) -> int:
    """Bytes of disk that a block takes."""
    seal_bytes = STAMP_BYTES + TAG_BYTES if is_sealed else 0
    return _aligned(head_bytes(origin) + num_bytes + seal_bytes)


@lru_cache(SHARED_MAX)
def head_bytes(origin: Origin) -> int:
    """Size of the header of a record with that origin."""
    return _FIXED_BYTES + len(origin_bytes(origin))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def record_header(
    name: BlockName,
    num_bytes: int,
    digest: bytes,
    origin: Origin,
    magic: bytes = MAGIC,
    seal: bytes = b"",
) -> bytes:
    """Header of the record of a block; `seal` is its stamp in a sealed folder."""
    layout_id, key = name
    whence = origin_bytes(origin)
    head = _HEADER.pack(magic, layout_id, key.group, key.block_hash, num_bytes, digest)
    head += _ORIGIN.pack(len(whence))
    return head + _check(head + whence + seal) + whence + seal


def dropped_header(name: BlockName, place: DiskPlace) -> bytes:
    """A header as long as that of the record it is written over, so that the next is found."""
    if place.key_id:
        seal = place.key_id + bytes(STAMP_BYTES - len(place.key_id))
        return record_header(
            name, place.num_bytes, bytes(32), place.origin, MAGIC_GONE_SEALED, seal
        )
    return record_header(name, place.num_bytes, bytes(32), place.origin, MAGIC_GONE)


def parse_header(data: bytes | bytearray) -> Header | None:
    """Parse the header of a record; None if it is invalid."""
    magic = bytes(data[: len(MAGIC)])
    is_sealed = magic in (MAGIC_SEALED, MAGIC_GONE_SEALED)
    if len(data) < _FIXED_BYTES or not (is_sealed or magic in (MAGIC, MAGIC_GONE)):
        return None
    head = bytes(data[: _HEADER.size + _ORIGIN.size])
    [size] = _ORIGIN.unpack_from(head, _HEADER.size)
    end = _FIXED_BYTES + size + (STAMP_BYTES if is_sealed else 0)
    rest = bytes(data[_FIXED_BYTES:end])
    if len(data) < end or _check(head + rest) != data[len(head) : _FIXED_BYTES]:
        return None
    _, layout_id, group, block_hash, num_bytes, digest = _HEADER.unpack_from(head)
    if not 1 <= num_bytes <= BLOCK_BYTES_MAX:
        return None
    is_gone = magic in (MAGIC_GONE, MAGIC_GONE_SEALED)
    name = layout_id, BlockKey(group, block_hash)
    return Header(name, num_bytes, digest, origin_in(rest[:size]), end, is_gone, rest[size:])


def _check(head: bytes) -> bytes:
    return blake3.blake3(head).digest(CHECK_BYTES)
