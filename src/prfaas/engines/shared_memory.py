"""Host memory of vLLM's engines in `/dev/shm`: owners of regions, and regions without owner.

vLLM keeps an engine's host memory in `/dev/shm/vllm_offload_{engine_id}.mmap`, and in files with a
number appended if it is split. An engine that is
killed leaves it behind, often more than a hundred GiB, and the next one finds no room.

Each process of an engine holds a shared `flock` on `vllm_offload_{engine_id}.owner` for as long as
it lives. The kernel drops it however the process ends, in whatever PID namespace it was. A region
whose owner file nobody locks is nobody's; a region without an owner file is not ours to judge.

Beside its region, each rank of an engine leaves a report, which it locks for as long as it lives.
The scheduler takes them: a rank that is on another host, or has another `/dev/shm`, has left none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_PREFIX, _OWNER, _REGION = "vllm_offload_", ".owner", ".mmap"


def claim(engine_id: str, directory: Path = SHARED_MEMORY) -> int:
    """Own the region of an engine until this process ends; before vLLM makes it; OSError if the
    owner file cannot be made.

    Args:
        engine_id: vLLM's, with the suffix of a data-parallel rank.
        directory: Where vLLM makes regions.

    Returns:
        A descriptor that holds the lock; it is not inherited by programs that are started.
    """
    path = directory / f"{_PREFIX}{engine_id}{_OWNER}"
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is(descriptor, path):
            return descriptor
        # It was removed between the two calls.
        os.close(descriptor)


def leave_report(engine_id: str, rank: int, report: bytes, directory: Path = SHARED_MEMORY) -> int:
    """Leave the report of a rank beside the region of its engine, until this process ends; OSError
    if the report cannot be written.

    Returns:
        A descriptor that holds the lock; it is not inherited by programs that are started.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(report_path(engine_id, rank, directory), flags, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, report, 0)
    return descriptor


def take_reports(
    engine_id: str, num_ranks: int, directory: Path = SHARED_MEMORY
) -> dict[int, bytes]:
    """Return the reports of the living ranks of an engine, by rank, and remove them."""
    found: dict[int, bytes] = {}
    for rank in range(num_ranks):
        path = report_path(engine_id, rank, directory)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                if os.fstat(descriptor).st_uid == os.geteuid() and _is_locked(descriptor):
                    found[rank] = file.read()
                    path.unlink()
    return found


def _is_locked(descriptor: int) -> bool:
    """Return True if another descriptor holds a lock on the file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def region_path(engine_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """Return the file with the host memory of an engine."""
    return directory / f"{_PREFIX}{engine_id}{_REGION}"


def report_path(engine_id: str, rank: int, directory: Path = SHARED_MEMORY) -> Path:
    """Return the file with the report of a rank; `remove_abandoned` removes it with the region."""
    return directory / f"{_PREFIX}{engine_id}{_REGION}.rank{rank}"


def remove_abandoned(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove the regions of this user without a living engine; returns the removed regions."""
    removed: list[Path] = []
    for owner, regions in _abandoned(directory):
        for region in regions:
            with contextlib.suppress(OSError):
                region.unlink()
                removed.append(region)
        with contextlib.suppress(OSError):
            owner.unlink()
    return removed


def abandoned_bytes(directory: Path = SHARED_MEMORY) -> int:
    """Memory that `remove_abandoned` would give back."""
    total = 0
    for _, regions in _abandoned(directory):
        for region in regions:
            with contextlib.suppress(OSError):
                total += region.stat().st_blocks * 512
    return total


def _abandoned(directory: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Owner file and the files of its region; the lock is held while the caller inspects it."""
    for owner in directory.glob(f"{_PREFIX}*{_OWNER}"):
        with contextlib.suppress(OSError), _locked(owner) as is_nobodys:
            if is_nobodys:
                region = owner.with_name(owner.name.removesuffix(_OWNER) + _REGION)
                parts = directory.glob(f"{_PREFIX}*{_REGION}.*")
                yield owner, [region, *(path for path in parts if path.stem == region.name)]


@contextlib.contextmanager
def _locked(owner: Path) -> Iterator[bool]:
    """Return True if the owner file is unlocked; it stays locked for others while the context is
    open."""
    # All users can create files here: only plain files of this user are removed.
    descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if _is_locked(descriptor):
            yield False
            return
        yield os.fstat(descriptor).st_uid == os.geteuid() and _is(descriptor, owner)
    finally:
        os.close(descriptor)


def _is(descriptor: int, path: Path) -> bool:
    """Return True if a path still names an open file."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
