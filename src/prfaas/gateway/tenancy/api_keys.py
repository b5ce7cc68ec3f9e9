"""API keys: made at random, kept as SHA-256 hashes, found without telling how close a guess was."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")
PREFIX = "sk-prfaas-"
KEY_BYTES = 32
"""Random bytes of a key. As many as nobody guesses, so a plain hash keeps it secret."""
KEY_CHARS_MAX = 512
_SCHEME = "sha256:"


def new_key() -> str:
    """A key that nobody has had."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_hash(key: str) -> str:
    """Hash of a key in a deployment file."""
    return _SCHEME + hashlib.sha256(key.encode()).hexdigest()


class ApiKeys(Generic[T]):
    """Owners by key.

    The time of a lookup does not depend on the key: hashes are compared under a secret of this
    process, so the time of comparisons reveals nothing about the stored keys.

    Args:
        owners: Hashes, as `key_hash` writes them, each with its owner.
    """

    def __init__(self, owners: Iterable[tuple[str, T]]) -> None:
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._owners = {self._blinded(text): owner for text, owner in owners}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, key: str) -> T | None:
        """Return the tenant of a key; None if unknown."""
        if not key or len(key) > KEY_CHARS_MAX:
            return None
        return self._owners.get(self._blinded(key_hash(key)))

    def _blinded(self, text: str) -> bytes:
        return hmac.digest(self._secret, text.encode(), "sha256")
