"""The tenant's cache salt: who does not know it can neither guess nor reach the tenant's blocks."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from prfaas.errors import ConfigError

FILE_NAME = "tenant.salt"
SALT_BYTES = 32
_SALT = re.compile(rb"[A-Za-z0-9_-]{43,128}")
"""What vLLM takes, and long enough that nobody guesses it."""


def tenant_salt(state: Path) -> str:
    """The salt kept in `state`, made on first use. Never log it.

    Raises:
        ConfigError: The file can not be made or read, or holds no salt.
    """
    path = state / FILE_NAME
    try:
        state.mkdir(parents=True, exist_ok=True)
        _create(path)
        salt = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path} can not be used: {error.strerror}") from None
    if not _SALT.fullmatch(salt):
        raise ConfigError(f"{path} holds no salt; remove it and a new one is made")
    return salt.decode()


def _create(path: Path) -> None:
    """Write a new salt unless there is one: complete or not at all, and never over another."""
    if path.exists():
        return
    draft = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(SALT_BYTES))
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
