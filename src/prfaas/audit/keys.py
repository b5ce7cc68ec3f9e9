"""Keys of audit logs: Ed25519, one per process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from prfaas.core.audit.verification import Check
from prfaas.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def signing_key(path: Path) -> Ed25519PrivateKey:
    """Load the key of a process, or create it with mode 0600.

    Raises:
        ConfigError: It cannot be read or created, is no Ed25519 key, or others can open it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        if path.stat().st_mode & _OTHERS:
            raise ConfigError(f"{path} can be opened by others; chmod 600 it, or make a new key")
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"audit key {path} cannot be used: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"audit key {path} is no Ed25519 key; remove it to create one")
    return key


def public_text(key: Ed25519PrivateKey) -> str:
    """The public part of a key, 64 hex digits."""
    return key.public_key().public_bytes_raw().hex()


def checker(public: str) -> Check:
    """Make the check of signatures by a public key; ConfigError if it is no such key.

    Args:
        public: 64 hex digits.
    """
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public.strip()))
    except ValueError:
        raise ConfigError(
            f"{public.strip()[:80]!r} is no public key of an audit log: 64 hex digits, as in "
            "NAME.pub"
        ) from None

    def check(data: bytes, signature: bytes) -> bool:
        try:
            key.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    return check


def _create(path: Path) -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
