"""Digests of whole files, kept so that a file that has not changed is read once.

Kept in `prfaas/file-digests` under `$XDG_CACHE_HOME` (`~/.cache` if that is not set): one small
file a digest, named by the file's path, device, inode, size, and times of modification and change.
Only the user that the engine runs as can write there; a directory that others could write to, or
that is a symbolic link, is not used, nor what somebody puts in its place meanwhile. A file's change
time cannot be set back, so a file that was written to is read again even if its size and
modification time were restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import msgspec

from prfaas.engines.identity.read_progress import FileProgress, ReadProgress
from prfaas.errors import ConfigError

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20
SETTLED_NS = 2 * 10**9
ENTRIES_MAX = 10_000
ENTRY_BYTES_MAX = 256
_LOCK = "lock"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path | None:
    """Directory of stored digests; None for a user without a home directory, whose digests are not
    stored."""
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
        settled_ns: Minimum age of a file whose digest is kept, ns: timestamps are coarse.
        entries_max: Kept digests; beyond it the oldest go.

    Attributes:
        progress: Files and bytes that were read so far.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        settled_ns: int = SETTLED_NS,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._settled_ns, self._entries_max = settled_ns, entries_max
        self._directory = directory if directory is not None else cache_directory()
        self.progress = ReadProgress()

    def digest(self, path: Path) -> bytes:
        """Return the digest of all bytes of a file, 32 bytes.

        Raises:
            ConfigError: The file cannot be read, or changed while it was read.
        """
        try:
            with (
                path.resolve(strict=True).open("rb", buffering=0) as file,
                _opened(self._directory, self._entries_max) as kept,
            ):
                self.progress.is_kept = kept is not None
                return _digest(file, path.resolve(), kept, self._settled_ns, self.progress)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror or error}; the engine's blocks are named "
                "by every byte of its model, so let it read all files of the checkpoint"
            ) from None


class _Kept:
    """The directory of digests, by a descriptor.

    What lies at its path may be swapped by whoever can write to a directory above it; what a
    descriptor leads to cannot.
    """

    def __init__(self, descriptor: int, entries_max: int) -> None:
        self._at = descriptor
        self._entries_max = entries_max

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lock for the digests of a checkpoint: one engine of the machine reads it, and the others
        use its digests."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # Without the lock it takes longer.
                lock = stack.enter_context(self._file(_LOCK, os.O_RDWR | os.O_CREAT))
                _lock(lock)
            yield

    def get(self, entry: str) -> bytes | None:
        """Return the digest that was kept under a name; None without any."""
        with contextlib.suppress(OSError, ValueError), self._file(entry, os.O_RDONLY) as file:
            digest = bytes.fromhex(os.read(file, ENTRY_BYTES_MAX).decode())
            return digest if len(digest) == blake3.blake3.digest_size else None
        return None

    def put(self, entry: str, digest: bytes) -> None:
        """Write an entry whole or not at all. A disk that is full costs time at the next start."""
        with contextlib.suppress(OSError):
            for oldest in self._surplus():
                os.unlink(oldest, dir_fd=self._at)
            fresh = f"{entry}.{os.getpid()}"
            with self._file(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                os.write(file, digest.hex().encode())
            os.replace(fresh, entry, src_dir_fd=self._at, dst_dir_fd=self._at)

    def _surplus(self) -> list[str]:
        with os.scandir(self._at) as found:
            entries = [
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
                for entry in found
                if entry.name != _LOCK
            ]
        return [name for _, name in sorted(entries)[: max(0, len(entries) - self._entries_max)]]

    @contextlib.contextmanager
    def _file(self, name: str, flags: int) -> Iterator[int]:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._at)
        try:
            yield file
        finally:
            os.close(file)


@contextlib.contextmanager
def _opened(directory: Path | None, entries_max: int) -> Iterator[_Kept | None]:
    """The directory if only this user can write there; None if it cannot be used."""
    with contextlib.ExitStack() as stack:
        kept = None
        if directory is not None:
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(directory, flags)
                stack.callback(os.close, descriptor)
                found = os.fstat(descriptor)
                if found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE:
                    kept = _Kept(descriptor, entries_max)
        yield kept


def _lock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process of this user that reads files of a model")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _digest(
    file: Any, path: Path, kept: _Kept | None, settled_ns: int, progress: ReadProgress
) -> bytes:
    before = os.fstat(file.fileno())
    if kept is None:
        return _read_whole(file, path, before, progress)
    entry = blake3.blake3(_key(path, before)).hexdigest()
    if (found := kept.get(entry)) is not None:
        progress.num_kept += 1
        return found
    with kept.alone():
        if (found := kept.get(entry)) is not None:
            progress.num_kept += 1
            return found
        started_ns = time.time_ns()
        digest = _read_whole(file, path, before, progress)
        changed_ns = max(before.st_mtime_ns, before.st_ctime_ns)
        if started_ns - changed_ns >= settled_ns:
            kept.put(entry, digest)
    return digest


def _read_whole(file: Any, path: Path, before: os.stat_result, progress: ReadProgress) -> bytes:
    digest = _read(file, progress.file(path.name, before.st_size))
    if _key(path, os.fstat(file.fileno())) != _key(path, before):
        raise ConfigError(
            f"{path} was changed while its digest was computed; start the engine again "
            "when the checkpoint is complete"
        )
    return digest


def _key(path: Path, found: os.stat_result) -> bytes:
    numbers = (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
    return msgspec.json.encode([str(path), *numbers])


def _read(file: Any, progress: FileProgress) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, progress.size + 1)))
    while length := file.readinto(buffer):
        hasher.update(buffer[:length])
        progress.advance(length)
    progress.finish()
    return hasher.digest()
