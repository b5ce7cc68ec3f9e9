"""Records of data connections without TLS: what is sent of a fragment, and its check.

    opening      magic "PFKS" | version u8 | protection u8 | zero u16 | session id 16 | number u64 | tag 16
    fragment     head: its prefix, padded to CODED_PREFIX_BYTES | tag 16
                 body: its bytes | tag 16
    fragment     ...

Nothing but the first 32 bytes of the opening is in the clear if records are sealed. A head has the
same size always, and names the size of its body, so no length is outside of what is authenticated.
Under `network` head and body are in the clear, and the tags are GMACs over them.

A record has no number on the wire: the receiver counts. One that was left out, repeated, moved,
changed, or sealed for another connection fails its tag, and the stream is lost.
"""  # noqa: E501 - one line a part

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.errors import PeerError
from prfaas.wire.fragments import CODED_PREFIX_BYTES
from prfaas.wire.sealed.keys import ID_BYTES, LIMITS, NUMBER_MAX, KeyLimits, LinkSecret, RecordKeys

MAGIC = b"PFKS"
VERSION = 1
TAG_BYTES = 16
HEAD_BYTES = CODED_PREFIX_BYTES + TAG_BYTES
_OPENING = struct.Struct(f">4sBBH{ID_BYTES}sQ")
_NUMBERED = struct.Struct(">QI")
OPENING_BYTES = _OPENING.size + TAG_BYTES
_PROTECTIONS = {LinkEncryption.SEALED: 1, LinkEncryption.NETWORK: 2}
Bytes = bytes | bytearray | memoryview


class SealError(PeerError):
    """A record is not the next one that its sender sealed for this connection.

    The cause is the path, not the peer, which has proved itself over TLS: the connection ends, and
    the link stays.
    """


@dataclass(frozen=True, slots=True)
class Opening:
    """First bytes of a data connection."""

    encryption: LinkEncryption
    """Protection that it names; authenticated with the tag."""
    link_id: bytes
    """Session that it claims to belong to."""
    number: int
    clear: bytes
    """The bytes that the tag covers."""
    tag: bytes
    """Proof that the caller has the session's secret."""


def decode_opening(data: Bytes) -> Opening:
    """Opening in the first OPENING_BYTES of a connection; nothing of it is proved yet; PeerError if
    they are none."""
    magic, version, protection, zero, link_id, number = _OPENING.unpack_from(data)
    if (magic, version, zero) != (MAGIC, VERSION, 0) or number >= NUMBER_MAX:
        raise PeerError(
            f"no data connection of version {VERSION}: {magic!r}, version {version}, "
            f"number {number}"
        )
    for encryption, value in _PROTECTIONS.items():
        if value == protection:
            clear = bytes(data[: _OPENING.size])
            return Opening(encryption, link_id, number, clear, bytes(data[_OPENING.size :]))
    raise PeerError(f"protection {protection} of a data connection; known are 1 and 2")


class _Records:
    """State that both ends of one connection compute alike."""

    def __init__(self, secret: LinkSecret, number: int, limits: KeyLimits) -> None:
        self._keys = RecordKeys(secret.of_connection(number), limits)
        self.is_encrypted = secret.encryption is LinkEncryption.SEALED
        self._clear = _OPENING.pack(
            MAGIC, VERSION, _PROTECTIONS[secret.encryption], 0, secret.id, number
        )
        self._count = 0

    def _bound(self, num_bytes: int) -> bytes:
        """Associated data of the next record: its connection, its number, its size."""
        self._count += 1
        return self._clear + _NUMBERED.pack(self._count, num_bytes)


class Sealer(_Records):
    """Sending end of one connection. Each record is sealed once, and sent in that order.

    Args:
        number: Of the connection; never used before in this session.
        limits: Use of one key.
    """

    def __init__(self, secret: LinkSecret, number: int, limits: KeyLimits = LIMITS) -> None:
        super().__init__(secret, number, limits)
        cipher, nonce = self._keys.take(0)
        self.opening = self._clear + cipher.encrypt(nonce, b"", self._clear)
        """First bytes of the connection, OPENING_BYTES."""

    def seal(self, data: Bytes, into: memoryview) -> None:
        """Write a sealed record; `into` has TAG_BYTES more than `data`."""
        cipher, nonce = self._keys.take(len(data))
        cipher.encrypt_into(nonce, data, self._bound(len(data)), into)

    def tag(self, data: Bytes) -> bytes:
        """Return the tag of a record that is sent as it is."""
        cipher, nonce = self._keys.take(len(data))
        return cipher.encrypt(nonce, b"", data)


class Opener(_Records):
    """Receiving end of one connection; SealError if the caller does not have the secret.

    Args:
        secret: Of the session that the opening names.
        opening: First bytes of the connection.
        limits: Use of one key.
    """

    def __init__(self, secret: LinkSecret, opening: Opening, limits: KeyLimits = LIMITS) -> None:
        super().__init__(secret, opening.number, limits)
        if opening.clear != self._clear:
            raise SealError("a data connection names another session or protection than agreed on")
        cipher, nonce = self._keys.take(0)
        try:
            cipher.decrypt(nonce, opening.tag, self._clear)
        except InvalidTag:
            raise SealError("a data connection is not opened by the session it names") from None

    def open(self, record: memoryview, into: memoryview | bytearray) -> None:
        """Write the content of a sealed record; after an error `into` holds anything; SealError if
        it is not the next record of this connection."""
        num_bytes = len(record) - TAG_BYTES
        cipher, nonce = self._keys.take(num_bytes)
        try:
            cipher.decrypt_into(nonce, record, self._bound(num_bytes), into)
        except InvalidTag:
            raise SealError(_NOT_NEXT) from None

    def check(self, data: Bytes, tag: Bytes) -> None:
        """Compare the tag of a record that came as it is; SealError if it is not the next record of
        this connection."""
        cipher, nonce = self._keys.take(len(data))
        try:
            cipher.decrypt(nonce, tag, data)
        except InvalidTag:
            raise SealError(_NOT_NEXT) from None


_NOT_NEXT = (
    "a record of a data connection fails its tag: it was changed, repeated, left out or moved on "
    "its way"
)


class ConnectionNumbers:
    """Numbers of the connections of a session that were used, in bounded memory.

    A repeated opening would have its keys used for a second stream. As of a sliding window (RFC
    4303, 3.4.3), a number far below the highest counts as used.
    """

    WINDOW = 4096

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._next = 0
        self._lock = threading.Lock()

    def claim(self, number: int) -> None:
        """Use a number whose opening was authenticated. Any thread may call it.

        Raises:
            SealError: It was used, or may have been.
        """
        with self._lock:
            self._claim(number)

    def _claim(self, number: int) -> None:
        if number in self._used or number < self._next - self.WINDOW:
            raise SealError(f"data connection {number} of this session was opened before")
        self._used.add(number)
        if number >= self._next:
            self._next = number + 1
            if len(self._used) > 2 * self.WINDOW:
                self._used = {one for one in self._used if one >= self._next - self.WINDOW}
