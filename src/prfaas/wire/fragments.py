"""Fragments of blocks, as they travel over the data connections of a link. No I/O.

After its `Join` a data connection carries nothing but fragments:

    magic "PFKV" | version u8 | kind u8 (3) | flags u16 | payload length u32
    transfer id 16 | layout id 32 | group u32 | block hash 32 | digest 32 | block bytes u32 | offset u32
    bytes

The only flag, 1, is set for a block that the sender has of another pool, or computed from such.

The digest is that of the whole block and binds its bytes to their name: it covers layout, group,
hash and content, so a block that was damaged, cut short or given another name fails it.
"""  # noqa: E501 - one line a part

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import blake3

from prfaas.core.kv.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey
from prfaas.core.transfer.link_scheduler import Fragment
from prfaas.errors import PeerError
from prfaas.wire.frames import MAGIC, TRANSFER_ID_BYTES, VERSION

FRAGMENT = 3
INHERITED = 1
"""The flag of a block that came to its sender from elsewhere, or was computed from such."""
FRAGMENT_BYTES_MAX = 1 << 20
BLOCK_BYTES_MAX = 256 * 2**20
"""Larger than any block of a public model at its largest block size."""
_PREFIX = struct.Struct(f">4sBBHI{TRANSFER_ID_BYTES}s{LAYOUT_ID_BYTES}sI{HASH_BYTES}s32sII")
_HEADER_BYTES = 12
PREFIX_BYTES = _PREFIX.size


def block_digest(layout_id: bytes, key: BlockKey, data: bytearray | memoryview | bytes) -> bytes:
    """BLAKE3 over the block's full name and its bytes; 32 bytes."""
    hasher = blake3.blake3(layout_id)
    hasher.update(key.group.to_bytes(4, "big"))
    hasher.update(key.block_hash)
    hasher.update(data)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A block of which all fragments are here.

    Attributes:
        transfer_id: The transfer it belongs to, 16 bytes.
        layout_id: The layout its name is valid in, 32 bytes.
        key: Its name.
        digest: As the sender computed it, 32 bytes; `is_intact` compares.
        data: Its bytes.
    """

    transfer_id: bytes
    layout_id: bytes
    key: BlockKey
    digest: bytes
    data: bytearray | memoryview
    is_inherited: bool = False
    """Whether the sender has it, or what it is computed from, of another pool."""

    @property
    def is_intact(self) -> bool:
        """Whether the bytes are what the sender named."""
        return block_digest(self.layout_id, self.key, self.data) == self.digest


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
    is_inherited: bool = False


def encode_prefix(fragment: Fragment) -> bytes:
    """What goes before the bytes of a fragment of at most FRAGMENT_BYTES_MAX."""
    block = fragment.block
    layout_id, key = block.name
    return _PREFIX.pack(
        MAGIC,
        VERSION,
        FRAGMENT,
        INHERITED if block.is_inherited else 0,
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
    is_known = (magic, version, kind) == (MAGIC, VERSION, FRAGMENT)
    if not is_known or flags not in (0, INHERITED):
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
    return FragmentPrefix(transfer_id, layout_id, key, digest, size, at, num_bytes, bool(flags))


class FragmentStream:
    """The bytes of a data connection, written straight to where each fragment belongs.

    Whoever reads writes the next bytes into `view` and says how many; any cut of the stream gives
    the same fragments. After a `PeerError` the stream is lost.

    Args:
        place: Where the bytes of a fragment go: as much memory as the fragment has bytes.
    """

    def __init__(self, place: Callable[[FragmentPrefix], memoryview]) -> None:
        self._place = place
        self._prefix_bytes = memoryview(bytearray(PREFIX_BYTES))
        self.view = self._prefix_bytes
        """What the next bytes fill; never empty."""
        self.prefix: FragmentPrefix | None = None
        """Of the fragment whose bytes come."""

    def filled(self, num_bytes: int) -> FragmentPrefix | None:
        """So many bytes were written to the start of `view`.

        Returns:
            The fragment that they complete.

        Raises:
            PeerError: They start no fragment, or one over a limit.
        """
        self.view = self.view[num_bytes:]
        if self.view:
            return None
        if self.prefix is None:
            self.prefix = decode_prefix(self._prefix_bytes)
            self.view = self._place(self.prefix)
            return None
        done, self.prefix = self.prefix, None
        self.view = self._prefix_bytes
        return done

    def feed(self, data: bytes | bytearray | memoryview) -> list[FragmentPrefix]:
        """The same for bytes that lie elsewhere: they are copied."""
        fragments, rest = [], memoryview(data)
        while rest:
            count = min(len(rest), len(self.view))
            self.view[:count] = rest[:count]
            rest = rest[count:]
            done = self.filled(count)
            if done is not None:
                fragments.append(done)
        return fragments

    def let_go(self) -> None:
        """Keep no memory of a block."""
        self.view, self.prefix = self._prefix_bytes, None
