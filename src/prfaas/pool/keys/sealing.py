"""Sealing of what leaves a pool node: a head in the clear, then parts under one AES-256-GCM key.

    magic 4 | version u8 | key id 8 | salt 32       the head

The salt makes the key of these parts (`site_keys`), and the nonce of a part is its number, so that
no pair of key and nonce is used twice. Every part is bound to the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_bytes

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from prfaas.errors import PrfaasError
from prfaas.pool.keys.site_keys import ID_BYTES, SALT_BYTES, KeyRing, SiteKey

MAGIC_BYTES, VERSION_BYTES = 4, 1
HEAD_BYTES = MAGIC_BYTES + VERSION_BYTES + ID_BYTES + SALT_BYTES
TAG_BYTES, NONCE_BYTES = 16, 12
_KEY_ID = slice(MAGIC_BYTES + VERSION_BYTES, MAGIC_BYTES + VERSION_BYTES + ID_BYTES)
Buffer = bytes | bytearray | memoryview


class AlteredError(PrfaasError):
    """Sealed bytes are not those that were written."""


class UnknownKeyError(PrfaasError):
    """Something was sealed with a key that this node does not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Seal:
    """Seals and opens the parts of one object."""

    head: bytes
    """HEAD_BYTES, in the clear at its start."""
    cipher: AESGCM

    def close(self, part: int, data: Buffer, bound: bytes = b"") -> bytes:
        """Seal a part, TAG_BYTES longer than `data`.

        Args:
            part: Its number, which no other part has.
            data: Its bytes.
            bound: Further bytes, such as a name, without which it cannot be opened.
        """
        return self.cipher.encrypt(_nonce(part), data, self.head + bound)

    def close_into(self, part: int, data: Buffer, into: memoryview, bound: bytes = b"") -> None:
        """Seal a part into a buffer that is TAG_BYTES longer than `data`."""
        self.cipher.encrypt_into(_nonce(part), data, self.head + bound, into)

    def open(self, part: int, sealed: Buffer, bound: bytes = b"") -> bytes:
        """Return the bytes of a part; AlteredError if they are not those that were sealed."""
        try:
            return self.cipher.decrypt(_nonce(part), sealed, self.head + bound)
        except InvalidTag:
            raise AlteredError(f"part {part} is altered") from None

    def open_into(self, part: int, sealed: Buffer, into: memoryview, bound: bytes = b"") -> None:
        """Write the bytes of a part into a buffer that is TAG_BYTES shorter than `sealed`.

        Raises:
            AlteredError: They are not those that were sealed. The buffer's content is undefined.
        """
        try:
            self.cipher.decrypt_into(_nonce(part), sealed, self.head + bound, into)
        except InvalidTag:
            raise AlteredError(f"part {part} is altered") from None


def new_seal(kind: bytes, key: SiteKey) -> Seal:
    """Return a seal with a fresh salt."""
    salt = token_bytes(SALT_BYTES)
    return Seal(kind + key.id + salt, key.cipher(salt))


def seal_of(kind: bytes, data: Buffer, keys: KeyRing) -> Seal:
    """Return the seal of an object.

    Args:
        kind: Magic and version that it should have.
        data: Its first HEAD_BYTES, or more.

    Raises:
        UnknownKeyError: It was sealed with a key that is not in `keys`.
        AlteredError: It is of another kind.
    """
    head = bytes(data[:HEAD_BYTES])
    if len(head) != HEAD_BYTES or not head.startswith(kind):
        raise AlteredError(f"it does not begin like an object of version {kind[MAGIC_BYTES]}")
    key = keys.keys.get(head[_KEY_ID])
    if key is None:
        raise UnknownKeyError(f"it is sealed with key {head[_KEY_ID].hex()}")
    return Seal(head, key.cipher(head[_KEY_ID.stop :]))


def _nonce(part: int) -> bytes:
    return part.to_bytes(NONCE_BYTES, "big")
