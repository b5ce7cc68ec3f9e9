"""The framing of every prfaas connection: bytes in, frames out, no I/O.

A frame is a 12-byte header and a message (msgpack):

    header   magic "PFKV" | version u8 | kind u8 (1) | flags u16 (zero) | payload length u32

Blocks travel in fragments, over connections of their own (`fragments.py`). Integers are big-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from prfaas.errors import PeerError

MAGIC = b"PFKV"
VERSION = 3
"""Version of the protocol: frames, fragments and messages.

Peers of different versions do not communicate.
"""
CONTROL = 1
TRANSFER_ID_BYTES = 16

CONTROL_BYTES_MAX = 8 * 2**20
"""A snapshot chunk or the blocks of one prefill chunk fit many times over."""

_HEADER = struct.Struct(">4sBBHI")


class VersionError(PeerError):
    """The peer speaks another version of the protocol."""

    def __init__(self, version: int) -> None:
        if version < VERSION:
            what = f"is too old: this side speaks {VERSION}; upgrade the peer"
        else:
            what = f"is newer than version {VERSION} of this side; upgrade this side"
        super().__init__(f"protocol version {version} of the peer {what}")
        self.version = version


@dataclass(frozen=True, slots=True)
class Frame:
    """One encoded message."""

    payload: bytes


def encode_control(payload: bytes, version: int = VERSION) -> bytes:
    """A control frame, ready to send; ValueError if `payload` is larger than CONTROL_BYTES_MAX.

    Args:
        version: Of the protocol; another one than ours for the last word to a peer that speaks it.
    """
    if len(payload) > CONTROL_BYTES_MAX:
        raise ValueError(
            f"control message of {len(payload)} bytes; the limit is {CONTROL_BYTES_MAX}"
        )
    return _HEADER.pack(MAGIC, version, CONTROL, 0, len(payload)) + payload


class FrameDecoder:
    """Turns a byte stream into frames, however the stream is cut.

    Holds at most one unfinished frame. After a `PeerError` the stream is lost and the decoder must
    not be fed again.
    """

    def __init__(self, *, control_bytes_max: int = CONTROL_BYTES_MAX) -> None:
        self._control_bytes_max = control_bytes_max
        self._pending = bytearray()
        self._wanted = _HEADER.size
        self._has_header = False
        """True if what is pending belongs to a payload."""

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
        """Digest the completed part, and return the next one to read."""
        part, self._pending = self._pending, bytearray()
        if not self._has_header:
            self._wanted, self._has_header = self._parse_header(part), True
            return None
        self._wanted, self._has_header = _HEADER.size, False
        return Frame(bytes(part))

    def _parse_header(self, part: bytearray) -> int:
        magic, version, kind, flags, length = _HEADER.unpack(part)
        if magic != MAGIC:
            raise PeerError(f"not a prfaas peer: the stream starts with {bytes(magic)!r}")
        if version != VERSION:
            raise VersionError(version)
        if flags:
            raise PeerError(f"frame flags {flags:#06x}; version {VERSION} defines none")
        if kind != CONTROL:
            raise PeerError(f"frame kind {kind}; known here is {CONTROL}")
        if not 1 <= length <= self._control_bytes_max:
            raise PeerError(
                f"frame of {length} bytes; the limits are 1 to {self._control_bytes_max}"
            )
        payload: int = length
        return payload
