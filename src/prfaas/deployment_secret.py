"""The secret of a deployment, from which the cache salts of its tenants derive."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from prfaas.errors import ConfigError

FILE_NAME = "tenant.salt"
SECRET_BYTES = 32
_SECRET = re.compile(rb"[A-Za-z0-9_-]{43,128}")
"""Long enough that nobody guesses it."""


def deployment_secret(state: Path) -> bytes:
    """The secret kept in `state`, made on first use. Never log it.

    Gateways of one deployment need the same, or they see none of each other's blocks.

    Raises:
        ConfigError: The file cannot be made or read, or holds no secret.
    """
    path = state / FILE_NAME
    try:
        state.mkdir(parents=True, exist_ok=True)
        _create(path)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}") from None
    if not _SECRET.fullmatch(secret):
        raise ConfigError(f"{path} holds no secret; remove it to create a new one")
    return secret


def _create(path: Path) -> None:
    """Write a new secret unless there is one: complete or not at all, and never over another."""
    if path.exists():
        return
    draft = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(SECRET_BYTES))
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
