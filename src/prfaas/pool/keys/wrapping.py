"""Wrapping of tenants' keys by a key of the site: the port for key management services.

One implementation exists: a file of the site's keys. Another one needs `wrap` and `unwrap` of 32
bytes, which Vault's transit engine and the key services of clouds have.
"""

from __future__ import annotations

from typing import Protocol

from prfaas.pool.keys.sealing import new_seal, seal_of
from prfaas.pool.keys.site_keys import KeyRing

KIND = b"PFTK\x01"
"""Magic and version of a wrapped key."""


class KeyWrapper(Protocol):
    """Encrypts keys, which come back only with its help."""

    def wrap(self, key: bytes, bound: bytes) -> bytes:
        """Encrypt a key.

        Args:
            bound: Bytes without which it cannot be decrypted, such as its name.
        """
        ...

    def is_current(self, wrapped: bytes) -> bool:
        """Return True if `wrap` would use the same key of the site."""
        ...

    def unwrap(self, wrapped: bytes, bound: bytes) -> bytes:
        """Decrypt a key.

        Raises:
            UnknownKeyError: It was wrapped by a key of the site that is not there.
            AlteredError: It is not what was wrapped, or not with these bytes.
        """
        ...


class SiteKeyWrapper:
    """Wraps keys with the keys of a site.

    Args:
        keys: Of the site; the first one wraps.
    """

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def wrap(self, key: bytes, bound: bytes) -> bytes:
        """Encrypt a key with the site's first key."""
        seal = new_seal(KIND, self._keys.sealing)
        return seal.head + seal.close(0, key, bound)

    def is_current(self, wrapped: bytes) -> bool:
        """Return True if a key is wrapped with the site's first key."""
        return wrapped.startswith(KIND + self._keys.sealing.id)

    def unwrap(self, wrapped: bytes, bound: bytes) -> bytes:
        """Decrypt a key.

        Raises:
            UnknownKeyError: It was wrapped with a key that the file lacks.
            AlteredError: It is not what was wrapped, or not with these bytes.
        """
        seal = seal_of(KIND, wrapped, self._keys)
        return seal.open(0, wrapped[len(seal.head) :], bound)
