"""Sealing of records on disk: AES-256-GCM with the key of the block's tenant.

    key of the tenant (random, in the keyring, wrapped by a key of the site)
      └─HKDF, salt of the segment (32 random bytes)─ key of the tenant's records in one segment

    stamp of a record    id of the tenant's key 16 | salt of the segment 32 | number u64

The nonce of a record is its number. Numbers of a segment are never used twice: they count up, also
after a write that failed, and a segment is written by one process, which draws its salt. A process
that starts anew never continues a segment. A record is bound to its header, its segment and its
place in it.
"""

from __future__ import annotations

import struct
import threading
from secrets import token_bytes

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from prfaas.pool.keys.keyring import Keyring
from prfaas.pool.keys.tenant_keys import KEY_ID_BYTES

SALT_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
CIPHERS_MAX = 1024
"""Derived keys that are kept for the next record alike."""
_STAMP = struct.Struct(f">{KEY_ID_BYTES}s{SALT_BYTES}sQ")
STAMP_BYTES = _STAMP.size
KEY_ID = slice(0, KEY_ID_BYTES)
Buffer = bytes | bytearray | memoryview


class RecordSeals:
    """Seals and opens the records of one disk tier. Records are sealed from one thread."""

    def __init__(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self._ciphers: dict[bytes, AESGCM] = {}
        self._sealed = bytearray()
        self._reading = threading.local()

    def knows(self, stamp: Buffer) -> bool:
        """Return True if the key of a record is there."""
        return self.keyring.get(bytes(stamp[KEY_ID])) is not None

    def close(self, stamp: bytes, data: Buffer, bound: bytes) -> memoryview:
        """Seal a block; the bytes, TAG_BYTES more, are valid until the next call; OSError if the
        key of the stamp was destroyed."""
        cipher = self._cipher(stamp)
        if cipher is None:
            raise OSError(0, "the key of its tenant was destroyed")
        size = len(data) + TAG_BYTES
        if len(self._sealed) < size:
            self._sealed = bytearray(size)
        sealed = memoryview(self._sealed)[:size]
        cipher.encrypt_into(_nonce(stamp), data, bound, sealed)
        return sealed

    def buffer(self, num_bytes: int) -> memoryview:
        """A buffer of this thread for a sealed block; valid until the next call."""
        held: bytearray = getattr(self._reading, "held", bytearray())
        if len(held) < num_bytes:
            held = self._reading.held = bytearray(num_bytes)
        return memoryview(held)[:num_bytes]

    def open(self, stamp: bytes, sealed: Buffer, bound: bytes, into: memoryview) -> bool:
        """Write the bytes of a block; False if it was altered, or its key is gone."""
        cipher = self._cipher(stamp)
        if cipher is None:
            return False
        try:
            cipher.decrypt_into(_nonce(stamp), sealed, bound, into)
        except InvalidTag:
            return False
        return True

    def forget(self) -> None:
        """Keys were destroyed: forget what was derived from them."""
        self._ciphers.clear()

    def _cipher(self, stamp: bytes) -> AESGCM | None:
        key_id, salt, _ = _STAMP.unpack(stamp)
        key = self.keyring.get(key_id)
        if key is None:
            return None
        cipher = self._ciphers.get(key_id + salt)
        if cipher is None:
            cipher = key.cipher(salt, b"disk 1")
            if len(self._ciphers) >= CIPHERS_MAX:
                self._ciphers.clear()
            self._ciphers[key_id + salt] = cipher
        return cipher


class SegmentStamps:
    """Stamps for the records of one segment, no two alike."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._salt = token_bytes(SALT_BYTES)
        self._next = 0

    def stamp(self, tenant: str) -> bytes:
        """The stamp of the next record.

        Raises:
            OSError: The tenant has no key yet, and a new one cannot be written.
        """
        number, self._next = self._next, self._next + 1
        return _STAMP.pack(self._keyring.sealing(tenant).id, self._salt, number)


def _nonce(stamp: bytes) -> bytes:
    number: int = _STAMP.unpack(stamp)[2]
    return number.to_bytes(NONCE_BYTES, "big")
