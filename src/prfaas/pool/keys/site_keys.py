"""Keys of a site: a file of secrets that all its pool nodes have.

    secret of the site (32 random bytes, in a file)
      └─HKDF─ id of the key, 8 bytes, in the clear at the start of every pack
      └─HKDF, salt of the pack (32 random bytes)─ key of one pack, AES-256-GCM

A key seals the parts of one pack, each with its number as nonce. No pair of key and nonce is used
twice, without a limit on the number of packs.
"""

from __future__ import annotations

import base64
import binascii
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from prfaas.errors import ConfigError

SECRET_BYTES, ID_BYTES, SALT_BYTES = 32, 8, 32
KEYS_MAX = 64
_FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class SiteKey:
    """A secret of the site."""

    secret: bytes = field(repr=False)
    """SECRET_BYTES random bytes."""

    @cached_property
    def id(self) -> bytes:
        """Public name of the key, ID_BYTES."""
        return _derive(self.secret, ID_BYTES, b"", b"prfaas shared tier: id")

    def cipher(self, salt: bytes) -> AESGCM:
        """Return the cipher of one pack."""
        return AESGCM(_derive(self.secret, 32, salt, b"prfaas shared tier: pack 1"))


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Keys by their id."""

    sealing: SiteKey
    """Key of new packs."""
    keys: dict[bytes, SiteKey] = field(repr=False)
    """All keys that packs can be read with."""


def load_keys(path: Path, purpose: str = "the shared tier") -> KeyRing:
    """Read a file of keys: base64 of 32 bytes a line, the sealing key first, `#` comments;
    ConfigError if the file is missing, open to everybody, or has no valid key.

    Args:
        purpose: What the keys are of, for errors.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"the keys of {purpose}, {path}, cannot be read: {error.strerror}; make the file "
            f"with: (umask 077; openssl rand -base64 32 > {path}), and copy it to every pool node "
            "of the site"
        ) from None
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{path} is a secret, and its mode {mode:o} lets everybody read it")
    lines = [line.split(b"#")[0].strip() for line in text.splitlines()]
    keys = [_key(path, number, line) for number, line in enumerate(lines, 1) if line]
    if not 1 <= len(keys) <= KEYS_MAX or len(text) > _FILE_BYTES_MAX:
        raise ConfigError(
            f"{path} has {len(keys)} keys of {purpose}; give it 1 to {KEYS_MAX}, each on a "
            "line, the one that seals first"
        )
    return KeyRing(keys[0], {key.id: key for key in keys})


def _key(path: Path, number: int, line: bytes) -> SiteKey:
    try:
        secret = base64.b64decode(line, validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"line {number} of {path} is no key: expected {SECRET_BYTES} random bytes in base64, "
            "as `openssl rand -base64 32` prints them"
        )
    return SiteKey(secret)


def _derive(secret: bytes, num_bytes: int, salt: bytes, label: bytes) -> bytes:
    return HKDF(hashes.SHA256(), num_bytes, salt, label).derive(secret)
