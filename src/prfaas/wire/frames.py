"""The framing of every prfaas connection: bytes in, frames out, no I/O.

A frame is a 12-byte header and a payload. A control frame carries one message; a block frame
carries a fixed block header and the bytes of one KV block:

    header   magic "PFKV" | version u8 | kind u8 | flags u16 (zero) | payload length u32
    control  message (msgpack)
    block    transfer id 16 | layout id 32 | group u32 | block hash 32 | digest 32 | block bytes

The digest binds the bytes to their name: it covers layout, group, hash and content, so a block that
was damaged, cut short or given another name fails it. Integers are big-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import blake3

from prfaas.core.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey
from prfaas.errors import PeerError

MAGIC = b"PFKV"
VERSION = 1
CONTROL = 1
BLOCK = 2
TRANSFER_ID_BYTES = 16

CONTROL_BYTES_MAX = 8 * 2**20
"""A snapshot chunk or the blocks of one prefill chunk fit many times over."""
BLOCK_BYTES_MAX = 256 * 2**20
"""Larger than any block of a public model at its largest block size."""

_HEADER = struct.Struct(">4sBBHI")
_BLOCK = struct.Struct(f">{TRANSFER_ID_BYTES}s{LAYOUT_ID_BYTES}sI{HASH_BYTES}s32s")


@dataclass(frozen=True, slots=True)
class ControlFrame:
    """One encoded message."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class BlockFrame:
    """One KV block on its way.

    Attributes:
        transfer_id: The transfer it belongs to, 16 bytes.
        layout_id: The layout its name is valid in, 32 bytes.
        key: Its name.
        digest: As the sender computed it, 32 bytes; `is_intact` compares.
        data: The block's bytes.
    """

    transfer_id: bytes
    layout_id: bytes
    key: BlockKey
    digest: bytes
    data: bytearray | memoryview

    @property
    def is_intact(self) -> bool:
        """Whether the bytes are what the sender named."""
        return block_digest(self.layout_id, self.key, self.data) == self.digest


Frame = ControlFrame | BlockFrame


def block_digest(layout_id: bytes, key: BlockKey, data: bytearray | memoryview | bytes) -> bytes:
    """BLAKE3 over the block's full name and its bytes; 32 bytes."""
    hasher = blake3.blake3(layout_id)
    hasher.update(key.group.to_bytes(4, "big"))
    hasher.update(key.block_hash)
    hasher.update(data)
    return hasher.digest()


def encode_control(payload: bytes) -> bytes:
    """A control frame, ready to send.

    Raises:
        ValueError: `payload` is larger than CONTROL_BYTES_MAX.
    """
    if len(payload) > CONTROL_BYTES_MAX:
        raise ValueError(
            f"control message of {len(payload)} bytes; the limit is {CONTROL_BYTES_MAX}"
        )
    return _HEADER.pack(MAGIC, VERSION, CONTROL, 0, len(payload)) + payload


def encode_block_header(
    transfer_id: bytes, layout_id: bytes, key: BlockKey, digest: bytes, num_bytes: int
) -> bytes:
    """What goes before the bytes of a block; the bytes themselves follow uncopied."""
    head = _HEADER.pack(MAGIC, VERSION, BLOCK, 0, _BLOCK.size + num_bytes)
    return head + _BLOCK.pack(transfer_id, layout_id, key.group, key.block_hash, digest)


class FrameDecoder:
    """Turns a byte stream into frames, however the stream is cut.

    Holds at most one unfinished frame. After a `PeerError` the stream is lost and the decoder must
    not be fed again.
    """

    def __init__(
        self,
        *,
        control_bytes_max: int = CONTROL_BYTES_MAX,
        block_bytes_max: int = BLOCK_BYTES_MAX,
    ) -> None:
        self._control_bytes_max = control_bytes_max
        self._block_bytes_max = block_bytes_max
        self._pending = bytearray()
        self._wanted = _HEADER.size
        self._header: tuple[int, int] | None = None
        """Kind and payload length, once the frame's header is in."""
        self._block: tuple[bytes, bytes, BlockKey, bytes] | None = None
        """The block header, once that is in."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that can be fed without going beyond the frame that is being read."""
        return self._wanted - len(self._pending)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Take the next bytes of the stream.

        Returns:
            The frames that these bytes complete, in order.

        Raises:
            PeerError: The bytes are no prfaas frames, or a frame is over a limit.
        """
        frames: list[Frame] = []
        view = memoryview(data)
        while view:
            take = min(len(view), self._wanted - len(self._pending))
            self._pending += view[:take]
            view = view[take:]
            if len(self._pending) == self._wanted:
                frame = self._advance()
                if frame is not None:
                    frames.append(frame)
        return frames

    def _advance(self) -> Frame | None:
        """Digest the part that is now complete, and say what is wanted next."""
        part, self._pending = self._pending, bytearray()
        if self._header is None:
            self._header = self._parse_header(part)
            kind, length = self._header
            self._wanted = length if kind == CONTROL else _BLOCK.size
            return None
        kind, length = self._header
        if kind == BLOCK and self._block is None:
            transfer_id, layout_id, group, block_hash, digest = _BLOCK.unpack(part)
            self._block = (transfer_id, layout_id, BlockKey(group, block_hash), digest)
            self._wanted = length - _BLOCK.size
            return None
        return self._finish(part)

    def _finish(self, part: bytearray) -> Frame:
        block, self._block, self._header = self._block, None, None
        self._wanted = _HEADER.size
        return ControlFrame(bytes(part)) if block is None else BlockFrame(*block, part)

    def _parse_header(self, part: bytearray) -> tuple[int, int]:
        magic, version, kind, flags, length = _HEADER.unpack(part)
        if magic != MAGIC:
            raise PeerError(f"not a prfaas peer: the stream starts with {bytes(magic)!r}")
        if version != VERSION:
            raise PeerError(f"frame version {version}; this side speaks {VERSION}")
        if flags:
            raise PeerError(f"frame flags {flags:#06x}; version {VERSION} defines none")
        if kind == CONTROL:
            smallest, largest = 1, self._control_bytes_max
        elif kind == BLOCK:
            smallest, largest = _BLOCK.size + 1, _BLOCK.size + self._block_bytes_max
        else:
            raise PeerError(f"frame kind {kind}; known are {CONTROL} and {BLOCK}")
        if not smallest <= length <= largest:
            raise PeerError(f"frame of {length} bytes; the limits are {smallest} to {largest}")
        return kind, length
