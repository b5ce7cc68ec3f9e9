"""Keys and nonces of sealed data connections.

    secret of a session (32 random bytes, from the receiver, inside TLS)
      └─HKDF─ id of the session, which data connections name in the clear
      └─HKDF─ secret of one connection ── generation 0 ──► key 0
                                           └─HKDF─ generation 1 ──► key 1 ...

Each derivation binds the version, the protection, both pools' names as their certificates have
them, the session's word, and the direction of the bytes. A pair of key and nonce is used once:

- a session has a fresh secret, so nothing is shared between sessions;
- a sender never gives two connections of a session the same number, and a receiver refuses one that
  it has seen, so no two connections share a key;
- the nonce is a counter that is advanced before it is used, and never reset: 4 bytes generation,
  8 bytes number of the record;
- only the source seals, in one direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_bytes

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption

SECRET_BYTES = 32
ID_BYTES = 16
NUMBER_MAX = 2**63
"""Limit of the number of a data connection."""
_VERSION = b"prfaas data connection 1"
_DIRECTION = b"source to destination"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Use of one key, before the next generation.

    TLS 1.3 allows an AES-GCM key 2**24.5 records of 16 KiB, 2**38.5 bytes, for an advantage of
    2**-57 (RFC 8446, 5.5). The default is under a fifth of that."""

    records: int = 1 << 24
    num_bytes: int = 1 << 36
    """Bytes sealed; a single record may be larger."""


LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class LinkSecret:
    """Root of the keys of one session of a link."""

    encryption: LinkEncryption
    """Protection that was agreed on; TLS has no secret."""
    source: str
    """Name of the pool that sends blocks."""
    destination: str
    """Name of the pool that receives them."""
    link: str
    """The source's word for the session."""
    secret: bytes = field(repr=False)
    """SECRET_BYTES random bytes of the destination's."""

    def __post_init__(self) -> None:
        """Reject what no keys can be made of."""
        if self.encryption not in WIRE_NAMES or len(self.secret) != SECRET_BYTES:
            raise ValueError(
                f"a session by {self.encryption.value} with a secret of {len(self.secret)} bytes; "
                f"only sealed and network sessions have one, of {SECRET_BYTES} bytes"
            )

    @property
    def id(self) -> bytes:
        """Public name of the session, ID_BYTES."""
        return _expand(self.secret, ID_BYTES, b"id", *self._ends)

    def of_connection(self, number: int) -> bytes:
        """Return the secret of a data connection.

        Args:
            number: Below NUMBER_MAX; no two connections of a session have the same.
        """
        return _expand(self.secret, SECRET_BYTES, b"connection", number.to_bytes(8), *self._ends)

    @property
    def _ends(self) -> tuple[bytes, ...]:
        names = WIRE_NAMES[self.encryption], self.source, self.destination, self.link
        return *(name.encode() for name in names), _DIRECTION


def new_secret() -> bytes:
    """A secret for one session."""
    return token_bytes(SECRET_BYTES)


class RecordKeys:
    """The key and the nonce of each record of one connection, in order.

    Both ends count alike, so the change to the next generation needs no message.

    Args:
        limits: Use of one key.
        cipher: Makes the cipher of a key.
    """

    def __init__(
        self, secret: bytes, limits: KeyLimits = LIMITS, cipher: Callable[[bytes], AESGCM] = AESGCM
    ) -> None:
        self._limits = limits
        self._make = cipher
        self._secret = secret
        self._generation = 0
        self._num_records = 0
        self._left_records = self._left_bytes = 0
        self._begin()

    def take(self, num_bytes: int) -> tuple[AESGCM, bytes]:
        """Return cipher and nonce of the next record, which has this many bytes. Never again the
        same pair."""
        if not self._left_records or (
            num_bytes > self._left_bytes and self._left_bytes < self._limits.num_bytes
        ):
            self._secret = _expand(self._secret, SECRET_BYTES, b"next")
            self._generation += 1
            self._begin()
        nonce = self._generation.to_bytes(4) + self._num_records.to_bytes(8)
        self._num_records += 1
        self._left_records -= 1
        self._left_bytes -= num_bytes
        return self._cipher, nonce

    def _begin(self) -> None:
        self._left_records, self._left_bytes = self._limits.records, self._limits.num_bytes
        self._cipher = self._make(_expand(self._secret, SECRET_BYTES, b"key"))


def _expand(secret: bytes, num_bytes: int, *labels: bytes) -> bytes:
    """HKDF-Expand (RFC 5869) of a secret that is uniformly random; labels cannot run together."""
    info = b"".join(len(label).to_bytes(2) + label for label in (_VERSION, *labels))
    return HKDFExpand(hashes.SHA256(), num_bytes, info).derive(secret)
