"""Progress of reading the files of a checkpoint: what is logged while an engine starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

PAUSE_NS = 10 * 10**9
"""Least time between two lines about one file."""


@dataclass(slots=True)
class ReadProgress:
    """Counts of files that were read, and of files whose digest was kept since an earlier start.

    Attributes:
        num_files: Files that were read.
        num_bytes: Bytes of these files.
        read_ns: Time that this took.
        num_kept: Files whose kept digest was used.
        is_kept: False if digests cannot be stored, so that every start reads all files.
    """

    num_files: int = 0
    num_bytes: int = 0
    read_ns: int = 0
    num_kept: int = 0
    is_kept: bool = True
    now_ns: Callable[[], int] = field(default=time.monotonic_ns, repr=False)

    def file(self, name: str, size: int) -> FileProgress:
        """Return the progress of a file that is about to be read."""
        now_ns = self.now_ns()
        return FileProgress(self, name, size, now_ns, now_ns)

    def log_summary(self) -> None:
        """Log the cost of the digests, once a checkpoint is known."""
        if self.num_files:
            log.info(
                "digests of the model's files: %.2f GB in %d files read in %.1f s, %.2f GB/s; "
                "%d files unchanged since an earlier start",
                self.num_bytes / 1e9,
                self.num_files,
                self.read_ns / 1e9,
                self.num_bytes / max(self.read_ns, 1),
                self.num_kept,
            )
        if self.num_files and not self.is_kept:
            log.warning(
                "these digests cannot be kept, and every start reads all files again: set "
                "XDG_CACHE_HOME to a directory that this user alone can write to"
            )


@dataclass(slots=True)
class FileProgress:
    """Progress of one file; a line at most every PAUSE_NS."""

    total: ReadProgress
    name: str
    size: int
    started_ns: int
    logged_ns: int
    num_bytes: int = 0

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were read and digested."""
        self.num_bytes += num_bytes
        now_ns = self.total.now_ns()
        if now_ns - self.logged_ns >= PAUSE_NS:
            self.logged_ns = now_ns
            log.info(
                "digest of %s: %.2f of %.2f GB, %.2f GB/s",
                self.name,
                self.num_bytes / 1e9,
                self.size / 1e9,
                self.num_bytes / max(now_ns - self.started_ns, 1),
            )

    def finish(self) -> None:
        """Add the file to the total."""
        self.total.num_files += 1
        self.total.num_bytes += self.num_bytes
        self.total.read_ns += self.total.now_ns() - self.started_ns
