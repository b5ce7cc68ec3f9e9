"""Purges that were begun: a file for each, until everything is done.

    FOLDER/GATEWAY.DIGEST.json    the target; DIGEST is of the target

A file is there before the first pool node is asked, synchronised to the disk, and removed when all
parts are done. A gateway repeats what it finds at its start. Every step of a purge may be repeated.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec

from prfaas.logs import log_event
from prfaas.purge.targets import HASHES_BYTES_MAX, Target

_log = logging.getLogger(__name__)

FOLDER = "purges"
INTENTS_MAX = 1000
FILE_BYTES_MAX = 2 * HASHES_BYTES_MAX


class Intents:
    """The purges that one gateway has begun.

    Args:
        state: Folder of the deployment's state; files are in a folder in it.
        gateway: Name of the gateway, part of the names of its files.
    """

    def __init__(self, state: Path, gateway: str) -> None:
        self._folder, self._gateway = state / FOLDER, gateway

    def begin(self, target: Target) -> None:
        """Record a purge. Once this returns, it survives a crash.

        Raises:
            OSError: It cannot be recorded.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(target)
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(target))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self._synchronise()

    def end(self, target: Target) -> None:
        """Remove a purge that is done.

        Raises:
            OSError: Its file cannot be removed; the purge will be repeated.
        """
        self._path(target).unlink(missing_ok=True)
        self._synchronise()

    def pending(self) -> list[Target]:
        """Purges that are not done, at most INTENTS_MAX."""
        found = []
        for path in sorted(self._folder.glob(f"{self._gateway}.*.json"))[:INTENTS_MAX]:
            try:
                with path.open("rb") as file:
                    found.append(msgspec.json.decode(file.read(FILE_BYTES_MAX), type=Target))
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                log_event(
                    _log, logging.ERROR, "purge_unreadable", file=str(path), why=str(error)[:200]
                )
        return found

    def _path(self, target: Target) -> Path:
        digest = hashlib.blake2b(msgspec.json.encode(target), digest_size=16).hexdigest()
        return self._folder / f"{self._gateway}.{digest}.json"

    def _synchronise(self) -> None:
        file = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
