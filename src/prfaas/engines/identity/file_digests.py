"""Digests of whole files, kept so that a file that has not changed is read once.

Kept in `prfaas/file-digests` under `$XDG_CACHE_HOME` (`~/.cache` if that is not set): one small
file a digest, named by the file's path, device, inode, size, and times of modification and change.
Only the user that the engine runs as can write there; a directory that others could write to is
not used. A file's change time can not be set back, so a file that was written to is read again even
if its size and modification time were restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import msgspec

from prfaas.errors import ConfigError

CHUNK_BYTES = 64 << 20
SETTLED_NS = 2 * 10**9
"""A digest is kept of a file that was last changed so long ago: timestamps are coarse."""
ENTRIES_MAX = 10_000
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path | None:
    """Where digests are kept; None for a user without a home, whose digests are not kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "prfaas" / "file-digests"


class FileDigests:
    """BLAKE3 digests of whole files.

    Args:
        directory: Where they are kept; it is made if it is missing.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = _usable(directory if directory is not None else cache_directory())

    def digest(self, path: Path) -> bytes:
        """Return the digest of all bytes of a file, 32 bytes.

        Raises:
            ConfigError: The file can not be read, or changed while it was read.
        """
        try:
            with path.resolve(strict=True).open("rb", buffering=0) as file:
                return self._digest(file, str(path.resolve()))
        except OSError as error:
            raise ConfigError(
                f"{path} can not be read: {error.strerror or error}; the engine's blocks are named "
                "by every byte of its model, so let it read all files of the checkpoint"
            ) from None

    def _digest(self, file: Any, path: str) -> bytes:
        before = os.fstat(file.fileno())
        entry = self._entry(path, before)
        if (found := _kept(entry)) is not None:
            return found
        with self._alone():
            if (found := _kept(entry)) is not None:
                return found
            started_ns = time.time_ns()
            digest = _read(file)
            if _key(path, os.fstat(file.fileno())) != _key(path, before):
                raise ConfigError(
                    f"{path} was changed while its digest was computed; start the engine again "
                    "when the checkpoint is complete"
                )
            changed_ns = max(before.st_mtime_ns, before.st_ctime_ns)
            if entry is not None and started_ns - changed_ns >= SETTLED_NS:
                _keep(entry, digest)
        return digest

    def _entry(self, path: str, found: os.stat_result) -> Path | None:
        if self._directory is None:
            return None
        return self._directory / blake3.blake3(_key(path, found)).hexdigest()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one engine of the machine read a checkpoint, and the others take its digests."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # Without the lock it takes longer.
                if self._directory is not None:
                    lock = stack.enter_context((self._directory / "lock").open("w"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _key(path: str, found: os.stat_result) -> bytes:
    numbers = (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
    return msgspec.json.encode([path, *numbers])


def _read(file: Any) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while length := file.readinto(buffer):
        hasher.update(buffer[:length])
    return hasher.digest()


def _usable(directory: Path | None) -> Path | None:
    """Return the directory if only this user can write there; None if it can not be used."""
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        return None
    return directory if os.access(directory, os.W_OK) else None


def _kept(entry: Path | None) -> bytes | None:
    if entry is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        digest = bytes.fromhex(entry.read_text())
        return digest if len(digest) == blake3.blake3.digest_size else None
    return None


def _keep(entry: Path, digest: bytes) -> None:
    """Write an entry whole or not at all. A disk that is full costs time at the next start."""
    with contextlib.suppress(OSError):
        others = sorted(entry.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for oldest in others[: max(0, len(others) - ENTRIES_MAX)]:
            oldest.unlink(missing_ok=True)
        fresh = entry.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest.hex())
        fresh.replace(entry)
