"""The site's key of a disk tier: a file that the operator names, or one made at the first start."""

from __future__ import annotations

import base64
import logging
import os
from pathlib import Path
from secrets import token_bytes

from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.keys.site_keys import SECRET_BYTES, load_keys
from prfaas.pool.keys.wrapping import SiteKeyWrapper

_log = logging.getLogger(__name__)

PURPOSE = "the disk tier"


def disk_wrapper(
    folder: Path, keys: Path | None, own: Path | None
) -> tuple[SiteKeyWrapper | None, bool]:
    """Return the wrapper of the keys of a disk tier, and True if its key was made just now.

    Without a wrapper blocks are in the clear.

    Args:
        folder: Of the disk tier.
        keys: File of the site's keys.
        own: Made if it is missing, where `keys` is None.

    Raises:
        ConfigError: The file cannot be read or made, is open to others, or has no valid key.
    """
    if keys is None and own is None:
        log_event(_log, logging.WARNING, "disk_in_the_clear", folder=str(folder))
        return None, False
    is_new = keys is None and own is not None and not own.exists() and _make(own)
    return SiteKeyWrapper(load_keys(keys or own or Path(), PURPOSE)), is_new


def _make(path: Path) -> bool:
    """Write a new key, complete or not at all; return False if another process did."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(base64.b64encode(token_bytes(SECRET_BYTES)) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            path.hardlink_to(draft)
            is_made = True
        except FileExistsError:
            is_made = False
        draft.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from None
    if is_made:
        log_event(_log, logging.INFO, "disk_key_made", file=str(path))
    return is_made
