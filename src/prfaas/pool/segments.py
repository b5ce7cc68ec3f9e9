"""The files of the disk tier: blocks appended to segments, each describing itself.

    FOLDER/prfaas-disk-tier       format version; locked while a pool node uses the folder
    FOLDER/0000000000000012.seg   records, each at a multiple of 4096 bytes

    record   magic "PFKVREC1" | layout id 32 | group u32 | block hash 32 | length u64 | digest 32
             | check 8 (of all before) | block bytes | zeros up to the next multiple

Nothing else is kept: what is there is found by walking the headers. A record that was being written
when the process died has a length that reaches beyond the file; a header that does not check is
stepped over to the next one that does. Bytes are checked by their digest when they are read.

Plain blocking I/O, to be called from threads: `append`, `seal` and `remove` from one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3

from prfaas.core.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey, BlockName
from prfaas.errors import ConfigError
from prfaas.wire.fragments import BLOCK_BYTES_MAX, block_digest

MARKER = "prfaas-disk-tier"
FORMAT = "1"
SUFFIX = ".seg"
MAGIC = b"PFKVREC1"
ALIGN_BYTES = 4096
CHECK_BYTES = 8
_HEADER = struct.Struct(f">8s{LAYOUT_ID_BYTES}sI{HASH_BYTES}sQ32s")
HEADER_BYTES = _HEADER.size + CHECK_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block lies.

    Attributes:
        segment: Number of the file.
        offset: Of the record, bytes.
        num_bytes: Of the block.
    """

    segment: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that was found at start."""

    number: int
    num_bytes: int
    used_at_ns: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What is in a segment, and how many records in it are broken."""

    records: list[tuple[BlockName, Place]]
    num_broken: int


def record_bytes(num_bytes: int) -> int:
    """Bytes of disk that a block takes."""
    return -(-(HEADER_BYTES + num_bytes) // ALIGN_BYTES) * ALIGN_BYTES


class SegmentFiles:
    """A folder of segments.

    Args:
        folder: Made if it is not there; only the owner may enter.

    Raises:
        ConfigError: The folder can not be used, is in use, or holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._lock = _claim(folder)
        except OSError as error:
            raise ConfigError(
                f"the disk tier can not use {folder}: {error.strerror or error}; "
                "name another folder"
            ) from None
        self._next = max((segment.number for segment in self.found()), default=-1) + 1
        self._active = -1
        self._active_bytes = 0

    def found(self) -> list[Segment]:
        """Segments on disk, the least recently used first."""
        found: list[Segment] = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path.stem.isdigit():
                status = path.stat()
                found.append(Segment(int(path.stem), status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda segment: (segment.used_at_ns, segment.number))

    def scan(self, number: int) -> Scan:
        """Walk the headers of a segment.

        Raises:
            OSError: It can not be read.
        """
        records: list[tuple[BlockName, Place]] = []
        num_broken = offset = 0
        is_lost = False
        with _opened(self._path(number), os.O_RDONLY) as file:
            end = os.fstat(file).st_size
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            while offset < end:
                header = _parse(os.pread(file, HEADER_BYTES, offset))
                step = ALIGN_BYTES
                if header is not None and offset + HEADER_BYTES + header[1] <= end:
                    name, num_bytes, _ = header
                    records.append((name, Place(number, offset, num_bytes)))
                    step, is_lost = record_bytes(num_bytes), False
                elif not is_lost:
                    num_broken += 1
                    is_lost = True
                offset += step
        return Scan(records, num_broken)

    def start(self) -> int:
        """Begin a new segment, which takes what is appended from now on; returns its number."""
        number = self._next
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._active = os.open(self._path(number), flags, 0o600)
        self._next += 1
        self._active_bytes = 0
        return number

    def append(self, name: BlockName, data: bytearray | memoryview, digest: bytes) -> Place:
        """Write a block to the segment that was started last.

        Once this returns, the block outlives the process.

        Raises:
            OSError: It can not be written; nothing of it is left.
        """
        offset, size = self._active_bytes, record_bytes(len(data))
        parts = [_header(name, len(data), digest), data]
        parts.append(bytes(size - HEADER_BYTES - len(data)))
        try:
            written = os.pwritev(self._active, parts, offset)
            if written < size:
                raise OSError(0, f"{written} of {size} bytes were written: the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._active, offset)
            raise
        self._active_bytes += size
        return Place(self._next - 1, offset, len(data))

    def seal(self) -> None:
        """Nothing more is appended to the segment: have it outlive a loss of power.

        Raises:
            OSError: It can not be written out.
        """
        active, self._active = self._active, -1
        if active >= 0:
            try:
                os.fdatasync(active)
                # Read once if ever: memory is better used by others.
                os.posix_fadvise(active, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(active)

    def read(self, name: BlockName, place: Place, into: memoryview) -> bytes | None:
        """Read a block, and note that its segment was used.

        Args:
            name: Its name.
            place: Where it lies.
            into: `place.num_bytes` bytes.

        Returns:
            Its digest; None if the bytes are not what was written.

        Raises:
            OSError: It can not be read.
        """
        head = bytearray(HEADER_BYTES)
        with _opened(self._path(place.segment), os.O_RDONLY) as file:
            count = os.preadv(file, [head, into], place.offset)
            os.utime(file)
        header = _parse(head)
        if count < HEADER_BYTES + len(into) or header is None:
            return None
        digest = header[2]
        is_same = header[:2] == (name, len(into)) and block_digest(*name, into) == digest
        return digest if is_same else None

    def remove(self, number: int) -> None:
        """Delete a segment; harmless if it is gone.

        Raises:
            OSError: It can not be deleted.
        """
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Let another pool node have the folder."""
        with contextlib.suppress(OSError):
            self.seal()
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:016d}{SUFFIX}"


def _header(name: BlockName, num_bytes: int, digest: bytes) -> bytes:
    layout_id, key = name
    head = _HEADER.pack(MAGIC, layout_id, key.group, key.block_hash, num_bytes, digest)
    return head + _check(head)


def _parse(data: bytes | bytearray) -> tuple[BlockName, int, bytes] | None:
    """Name, length and digest; None if this is no header."""
    head = bytes(data[: _HEADER.size])
    if len(data) < HEADER_BYTES or _check(head) != data[_HEADER.size :]:
        return None
    magic, layout_id, group, block_hash, num_bytes, digest = _HEADER.unpack(head)
    if magic != MAGIC or not 1 <= num_bytes <= BLOCK_BYTES_MAX:
        return None
    return (layout_id, BlockKey(group, block_hash)), num_bytes, digest


def _check(head: bytes) -> bytes:
    return blake3.blake3(head).digest(CHECK_BYTES)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _claim(folder: Path) -> int:
    """Make the folder ours: a descriptor that holds the lock."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    marker = folder / MARKER
    others = {entry.name for entry in folder.iterdir()} - {"lost+found"}
    if others and MARKER not in others:
        raise ConfigError(
            f"{folder} is no folder of a disk tier: it holds {min(others)}; name an empty folder"
        )
    lock = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = os.pread(lock, 64, 0).decode(errors="replace").strip()
        if written not in ("", FORMAT):
            raise ConfigError(
                f"{folder} has format {written!r} of the disk tier; this version writes "
                f"{FORMAT!r}: name another folder, or delete this one"
            )
        folder.chmod(0o700)
        os.pwrite(lock, f"{FORMAT}\n".encode(), 0)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another pool node uses {folder}; name another folder") from None
    except (ConfigError, OSError):
        os.close(lock)
        raise
    return lock
