"""Fragments of blocks, as they travel over the data connections of a link. No I/O.

After its `Join` a data connection carries nothing but fragments:

    magic "PFKV" | version u8 | kind u8 (3) | flags u16 | payload length u32
    transfer id 16 | layout id 32 | group u32 | block hash 32 | digest 32 | block bytes u32 | offset u32
    bytes

Flag 1 is set for a block that the sender has of another pool, or computed from such. The other 15
flags are the code of its age (`core/cache/eviction.py`), zero if the receiver has not said that it takes ages.

On a link whose ends have agreed on codecs, a fragment may be coded. It is of kind 4, and its prefix
ends with two more fields:

    codec u8 | decoded bytes u32

A block that its sender rounds (`core/codec/codecs.py`) travels as a stream, of which a fragment of kind
5 is a part. Its prefix ends with the same two fields, of which the second is the size of the whole
stream; the offset is that in the stream.

    codec u8 | stream bytes u32

In kind 4, block bytes and offset are of decoded bytes, and the payload is always shorter than what it decodes
to: no fragment can need more memory than FRAGMENT_BYTES_MAX before it is decoded, or after.

The digest is that of the whole block and binds its bytes to their name: it covers layout, group,
hash and content, so a block that was damaged, cut short or given another name fails it. The digest of a rounded block is that of the
bytes that its stream decodes to.
"""  # noqa: E501 - one line a part

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import blake3

from prfaas.core.cache.eviction import is_age_code
from prfaas.core.codec.codecs import RAW_NUMBER, SegmentMode
from prfaas.core.kv.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey
from prfaas.core.transfer.link_scheduler import Fragment
from prfaas.errors import PeerError
from prfaas.wire.frames import MAGIC, TRANSFER_ID_BYTES, VERSION

FRAGMENT, CODED_FRAGMENT, STREAM_FRAGMENT = 3, 4, 5
INHERITED = 1
"""The flag of a block that came to its sender from elsewhere, or was computed from such."""
FRAGMENT_BYTES_MAX = 1 << 20
BLOCK_BYTES_MAX = 256 * 2**20
"""Larger than any block of a public model at its largest block size."""
_PREFIX = struct.Struct(f">4sBBHI{TRANSFER_ID_BYTES}s{LAYOUT_ID_BYTES}sI{HASH_BYTES}s32sII")
_HEADER_BYTES = 12
PREFIX_BYTES = _PREFIX.size
_CODING = struct.Struct(">BI")
CODED_PREFIX_BYTES = PREFIX_BYTES + _CODING.size


def block_digest(layout_id: bytes, key: BlockKey, data: bytearray | memoryview | bytes) -> bytes:
    """BLAKE3 over the block's full name and its bytes; 32 bytes."""
    hasher = blake3.blake3(layout_id)
    hasher.update(key.group.to_bytes(4, "big"))
    hasher.update(key.block_hash)
    hasher.update(data)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A block of which all fragments are here."""

    transfer_id: bytes
    """The transfer it belongs to, 16 bytes."""
    layout_id: bytes
    """The layout its name is valid in, 32 bytes."""
    key: BlockKey
    digest: bytes
    """As the sender computed it, 32 bytes; `is_intact` compares."""
    data: bytearray | memoryview
    """Its bytes."""
    is_inherited: bool = False
    """True if the sender has it, or a block it was computed from, from another pool."""
    stream_bytes: int = 0
    """Size of the stream with which `data` starts, if the block was rounded; 0 if it was not."""
    modes: frozenset[SegmentMode] = frozenset()
    """Roundings of the stream, once it was decoded."""
    age: int = 0
    """Code of its age."""

    @property
    def is_intact(self) -> bool:
        """Return True if the bytes match the sender's digest."""
        return block_digest(self.layout_id, self.key, self.data) == self.digest


@dataclass(frozen=True, slots=True)
class FragmentPrefix:
    """Return the header of a fragment."""

    transfer_id: bytes
    """The transfer it belongs to, 16 bytes."""
    layout_id: bytes
    """The layout its name is valid in, 32 bytes."""
    key: BlockKey
    """Name of its block."""
    digest: bytes
    """Of its block, decoded, 32 bytes."""
    block_bytes: int
    """Size of its block, decoded."""
    offset: int
    """Its place in its block."""
    num_bytes: int
    """How much of the block it is, decoded."""
    is_inherited: bool = False
    """Whether the block came to the sender from elsewhere."""
    codec: int = RAW_NUMBER
    """Number of its codec; 0 is raw."""
    coded_bytes: int = 0
    """Bytes that follow if it is coded by itself."""
    stream_bytes: int = 0
    """Size of the stream that it is a part of; 0 if its block is not rounded. Then `offset` and
    `num_bytes` are those in the stream."""
    age: int = 0
    """Code of the age of its block."""

    @property
    def payload_bytes(self) -> int:
        """Bytes that follow it."""
        return self.coded_bytes or self.num_bytes


def encode_prefix(fragment: Fragment, age: int = 0) -> bytes:
    """Return the header of a fragment of at most FRAGMENT_BYTES_MAX, with the code of its age."""
    payload_bytes = PREFIX_BYTES - _HEADER_BYTES + fragment.num_bytes
    return _encode_prefix(fragment, FRAGMENT, payload_bytes, age)


def encode_coded_prefix(fragment: Fragment, codec: int, coded_bytes: int, age: int = 0) -> bytes:
    """Return what goes before a coded fragment.

    Args:
        codec: Number of the codec, above 0.
        coded_bytes: Size of the coded stream, fewer than the fragment has.
        age: Code of the age of its block.
    """
    payload_bytes = CODED_PREFIX_BYTES - _HEADER_BYTES + coded_bytes
    prefix = _encode_prefix(fragment, CODED_FRAGMENT, payload_bytes, age)
    return prefix + _CODING.pack(codec, fragment.num_bytes)


def encode_stream_prefix(fragment: Fragment, codec: int, age: int = 0) -> bytes:
    """Return what goes before a part of a stream.

    Args:
        fragment: Of a block that has a stream.
        codec: Number of the codec, above 0.
        age: Code of the age of its block.
    """
    payload_bytes = CODED_PREFIX_BYTES - _HEADER_BYTES + fragment.num_bytes
    prefix = _encode_prefix(fragment, STREAM_FRAGMENT, payload_bytes, age)
    return prefix + _CODING.pack(codec, fragment.block.wire_bytes)


def _encode_prefix(fragment: Fragment, kind: int, payload_bytes: int, age: int) -> bytes:
    block = fragment.block
    layout_id, key = block.name
    return _PREFIX.pack(
        MAGIC,
        VERSION,
        kind,
        age << 1 | (INHERITED if block.is_inherited else 0),
        payload_bytes,
        block.transfer_id,
        layout_id,
        key.group,
        key.block_hash,
        block.digest,
        len(block.data),
        fragment.offset,
    )


def prefix_bytes(start: bytes | bytearray | memoryview) -> int:
    """Return how long the prefix is that starts with these PREFIX_BYTES bytes."""
    is_coded = start[:4] == MAGIC and start[5] in (CODED_FRAGMENT, STREAM_FRAGMENT)
    return CODED_PREFIX_BYTES if is_coded else PREFIX_BYTES


def decode_prefix(data: bytes | bytearray | memoryview) -> FragmentPrefix:
    """Kind of the next bytes of a data connection.

    Args:
        data: As many bytes as `prefix_bytes` says.

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
    ) = _PREFIX.unpack_from(data)
    is_long = len(data) == CODED_PREFIX_BYTES
    wanted = (CODED_FRAGMENT, STREAM_FRAGMENT) if is_long else (FRAGMENT,)
    is_known = (magic, version) == (MAGIC, VERSION) and kind in wanted
    if not is_known or not is_age_code(flags >> 1):
        raise PeerError(
            f"no fragment of version {VERSION}: {magic!r}, version {version}, kind {kind}, "
            f"flags {flags:#06x}"
        )
    num_bytes = length - (len(data) - _HEADER_BYTES)
    codec = coded_bytes = stream_bytes = 0
    if kind == CODED_FRAGMENT:
        coded_bytes = num_bytes
        codec, num_bytes = _CODING.unpack_from(data, PREFIX_BYTES)
        if codec == RAW_NUMBER or not 1 <= coded_bytes < num_bytes:
            raise PeerError(
                f"coded fragment (codec {codec}) of {coded_bytes} bytes for {num_bytes}; "
                "a coded fragment has a codec, and is shorter than what it decodes to"
            )
    if kind == STREAM_FRAGMENT:
        codec, stream_bytes = _CODING.unpack_from(data, PREFIX_BYTES)
        if codec == RAW_NUMBER or not at + num_bytes <= stream_bytes < size:
            raise PeerError(
                f"fragment of {num_bytes} bytes at {at} of a stream (codec {codec}) of "
                f"{stream_bytes} for a block of {size}; a stream has a codec, and is shorter than "
                "its block"
            )
    if not 1 <= num_bytes <= FRAGMENT_BYTES_MAX:
        raise PeerError(f"fragment of {num_bytes} bytes; the limits are 1 to {FRAGMENT_BYTES_MAX}")
    if not at + num_bytes <= size <= BLOCK_BYTES_MAX:
        raise PeerError(
            f"fragment of {num_bytes} bytes at {at} of a block of {size}; "
            f"the limit of a block is {BLOCK_BYTES_MAX}"
        )
    key = BlockKey(group, block_hash)
    return FragmentPrefix(
        transfer_id,
        layout_id,
        key,
        digest,
        size,
        at,
        num_bytes,
        bool(flags & INHERITED),
        codec,
        coded_bytes,
        stream_bytes,
        flags >> 1,
    )


class FragmentStream:
    """The bytes of a data connection, written straight to where each fragment belongs.

    The reader writes the next bytes into `view` and reports their number; any split of the stream
    gives the same fragments. After a `PeerError` the stream is lost.

    Args:
        place: Where the bytes of a fragment go: as much memory as bytes follow its prefix.
    """

    def __init__(self, place: Callable[[FragmentPrefix], memoryview]) -> None:
        self._place = place
        self._start = memoryview(bytearray(CODED_PREFIX_BYTES))
        self._start_bytes = PREFIX_BYTES
        self.view = self._start[:PREFIX_BYTES]
        """Buffer for the next bytes; never empty."""
        self.prefix: FragmentPrefix | None = None
        """Header of the fragment that is being read."""

    def filled(self, num_bytes: int) -> FragmentPrefix | None:
        """Record that `count` bytes were written to the start of `view`.

        Returns:
            The fragment that they complete.

        Raises:
            PeerError: They start no fragment, or one over a limit.
        """
        self.view = self.view[num_bytes:]
        if self.view:
            return None
        if self.prefix is None:
            known = self._start[: self._start_bytes]
            self._start_bytes = prefix_bytes(known)
            self.view = self._start[len(known) : self._start_bytes]
            if not self.view:
                self.prefix = decode_prefix(known)
                self.view = self._place(self.prefix)
            return None
        done = self.prefix
        self.let_go()
        return done

    @property
    def missing_bytes(self) -> int:
        """Bytes that the fragment lacks; 1 if it has not begun."""
        return len(self.view) if self.prefix is not None else 1

    def divert(self, nowhere: memoryview) -> None:
        """Write the rest of the fragment elsewhere: another connection brings it."""
        self.view = nowhere[: len(self.view)]

    def ended(self) -> None:
        """The connection has ended. A fragment that was cut comes again over another one."""

    def let_go(self) -> None:
        """Keep no memory of a block."""
        self._start_bytes = PREFIX_BYTES
        self.view, self.prefix = self._start[:PREFIX_BYTES], None
