"""The files of the disk tier: blocks appended to segments, each describing itself.

    FOLDER/prfaas-disk-tier       format version; locked while a pool node uses the folder
    FOLDER/0000000000000012.seg   records, each at a multiple of 4096 bytes (below)
    FOLDER/regions                where its blocks may rest (`region_stamp.py`)

Nothing else is kept: what is there is found by walking the headers. A record that was being written
when the process died has a length that reaches beyond the file; a header that does not check is
stepped over to the next one that does. Bytes are checked by their digest when they are read.

Plain blocking I/O, to be called from threads: `append`, `seal` and `remove` from one at a time.

A record is the header of a block, and the block:

    record   magic "PFKVREC2" | layout id 32 | group u32 | block hash 32 | length u64 | digest 32
             | origin length u16 | check 8 (of all before, and the origin) | origin | block bytes
             | zeros up to the next multiple

The magic "PFKVGON2" makes a record one that was dropped.

In a sealed folder the digest is zero, a stamp (`keys/record_seals.py`) follows the origin, and the
block is followed by its tag ("PFKVREC3", "PFKVGON3"). All of the header, the number of the segment
and the offset are bound to the block. A sealed folder also has `keyring`, the keys of tenants. A
record without its key is as one that was dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import blake3

from prfaas.core.cache.keep_rules import Origin
from prfaas.core.kv.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey, BlockName
from prfaas.core.transfer.residency import Regions
from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.keys.keyring import FILE_NAME, Keyring
from prfaas.pool.keys.record_seals import KEY_ID, STAMP_BYTES, TAG_BYTES, RecordSeals, SegmentStamps
from prfaas.pool.keys.wrapping import KeyWrapper
from prfaas.pool.store.origins import ORIGIN_BYTES_MAX, SHARED_MAX, origin_bytes, origin_in
from prfaas.pool.store.region_stamp import stamp
from prfaas.wire.fragments import BLOCK_BYTES_MAX, block_digest

MAGIC, MAGIC_GONE = b"PFKVREC2", b"PFKVGON2"
MAGIC_SEALED, MAGIC_GONE_SEALED = b"PFKVREC3", b"PFKVGON3"
ALIGN_BYTES = 4096
CHECK_BYTES = 8
_HEADER = struct.Struct(f">8s{LAYOUT_ID_BYTES}sI{HASH_BYTES}sQ32s")
_ORIGIN = struct.Struct(">H")
PLACE = struct.Struct(">QQ")
_FIXED_BYTES = _HEADER.size + _ORIGIN.size + CHECK_BYTES
HEADER_BYTES_MAX = _FIXED_BYTES + ORIGIN_BYTES_MAX + STAMP_BYTES


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Place of a block."""

    segment: int
    """Number of the file."""
    offset: int
    """Of the record, bytes."""
    num_bytes: int
    origin: Origin
    """Its origin."""
    head_bytes: int
    """Size of the header of its record."""
    key_id: bytes = b""
    """Name of the key that it is sealed with; empty if it is in the clear."""

    @property
    def stored_bytes(self) -> int:
        """Bytes after the header: the block, and its tag if it is sealed."""
        return self.num_bytes + (TAG_BYTES if self.key_id else 0)

    @property
    def record_bytes(self) -> int:
        """Bytes of disk that its record takes."""
        return _aligned(self.head_bytes + self.stored_bytes)


class Header(NamedTuple):
    """Header of a record."""

    name: BlockName
    num_bytes: int
    digest: bytes
    origin: Origin
    head_bytes: int
    is_gone: bool
    stamp: bytes = b""


def record_bytes(num_bytes: int, origin: Origin, *, is_sealed: bool = False) -> int:
    """Bytes of disk that a block takes."""
    seal_bytes = STAMP_BYTES + TAG_BYTES if is_sealed else 0
    return _aligned(head_bytes(origin) + num_bytes + seal_bytes)


@lru_cache(SHARED_MAX)
def head_bytes(origin: Origin) -> int:
    """Size of the header of a record with that origin."""
    return _FIXED_BYTES + len(origin_bytes(origin))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def record_header(
    name: BlockName,
    num_bytes: int,
    digest: bytes,
    origin: Origin,
    magic: bytes = MAGIC,
    seal: bytes = b"",
) -> bytes:
    """Header of the record of a block; `seal` is its stamp in a sealed folder."""
    layout_id, key = name
    whence = origin_bytes(origin)
    head = _HEADER.pack(magic, layout_id, key.group, key.block_hash, num_bytes, digest)
    head += _ORIGIN.pack(len(whence))
    return head + _check(head + whence + seal) + whence + seal


def dropped_header(name: BlockName, place: DiskPlace) -> bytes:
    """A header as long as that of the record it is written over, so that the next is found."""
    if place.key_id:
        seal = place.key_id + bytes(STAMP_BYTES - len(place.key_id))
        return record_header(
            name, place.num_bytes, bytes(32), place.origin, MAGIC_GONE_SEALED, seal
        )
    return record_header(name, place.num_bytes, bytes(32), place.origin, MAGIC_GONE)


def parse_header(data: bytes | bytearray) -> Header | None:
    """Parse the header of a record; None if it is invalid."""
    magic = bytes(data[: len(MAGIC)])
    is_sealed = magic in (MAGIC_SEALED, MAGIC_GONE_SEALED)
    if len(data) < _FIXED_BYTES or not (is_sealed or magic in (MAGIC, MAGIC_GONE)):
        return None
    head = bytes(data[: _HEADER.size + _ORIGIN.size])
    [size] = _ORIGIN.unpack_from(head, _HEADER.size)
    end = _FIXED_BYTES + size + (STAMP_BYTES if is_sealed else 0)
    rest = bytes(data[_FIXED_BYTES:end])
    if len(data) < end or _check(head + rest) != data[len(head) : _FIXED_BYTES]:
        return None
    _, layout_id, group, block_hash, num_bytes, digest = _HEADER.unpack_from(head)
    if not 1 <= num_bytes <= BLOCK_BYTES_MAX:
        return None
    is_gone = magic in (MAGIC_GONE, MAGIC_GONE_SEALED)
    name = layout_id, BlockKey(group, block_hash)
    return Header(name, num_bytes, digest, origin_in(rest[:size]), end, is_gone, rest[size:])


def _check(head: bytes) -> bytes:
    return blake3.blake3(head).digest(CHECK_BYTES)


_log = logging.getLogger(__name__)

MARKER = "prfaas-disk-tier"
FORMAT, FORMAT_SEALED = "2", "sealed 1"
SUFFIX = ".seg"


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A file that was found at start."""

    number: int
    num_bytes: int
    used_at_ns: int


@dataclass(frozen=True, slots=True)
class Scan:
    """Contents of a segment, and the number of its broken records."""

    records: list[tuple[BlockName, DiskPlace]]
    num_broken: int


class SegmentFiles:
    """A folder of segments.

    Args:
        folder: Made if it is not there; only the owner may enter.
        regions: Footprint of the pool node; segments of another one are removed.
        wrapper: Wraps the keys of tenants; without one, blocks are in the clear.
        is_new_key: The key of the wrapper is new, and the one before it is gone: a keyring is
            removed, and with it the blocks of the folder.

    Raises:
        ConfigError: The folder cannot be used, is in use, or holds something else; or a keyring is
            there, and cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        regions: Regions = frozenset(),
        wrapper: KeyWrapper | None = None,
        *,
        is_new_key: bool = False,
    ) -> None:
        self.folder = folder
        self._seals: RecordSeals | None = None
        try:
            self._lock = _claim(folder, is_sealed=wrapper is not None)
            stamp(folder, regions, folder.glob(f"*{SUFFIX}"))
            if is_new_key:
                _lose(folder)
            if wrapper is not None:
                self._seals = RecordSeals(_keyring(folder, wrapper, self._lock))
        except OSError as error:
            raise ConfigError(
                f"the disk tier cannot use {folder}: {error.strerror or error}; name another folder"
            ) from None
        self._next = max((segment.number for segment in self.found()), default=-1) + 1
        self._open: dict[int, tuple[int, int]] = {}
        """Descriptor and bytes of each segment that is being written."""
        self._stamps: dict[int, SegmentStamps] = {}

    @property
    def keyring(self) -> Keyring | None:
        """Keys of tenants; None in a folder in the clear."""
        return self._seals.keyring if self._seals is not None else None

    def destroy_keys(self, tenant: str) -> int:
        """Destroy the keys of a tenant; return their number. Its records are lost for good.

        Raises:
            OSError: They cannot be destroyed.
        """
        if self._seals is None:
            return 0
        number = self._seals.keyring.destroy(tenant)
        self._seals.forget()
        return number

    def found(self) -> list[FoundSegment]:
        """Segments on disk, the least recently used first."""
        found: list[FoundSegment] = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path.stem.isdigit():
                status = path.stat()
                found.append(FoundSegment(int(path.stem), status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda segment: (segment.used_at_ns, segment.number))

    def scan(self, number: int) -> Scan:
        """Walk the headers of a segment; OSError if it cannot be read."""
        records: list[tuple[BlockName, DiskPlace]] = []
        num_broken = offset = 0
        is_lost = False
        with _opened(self._path(number), os.O_RDONLY) as file:
            end = os.fstat(file).st_size
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            while offset < end:
                header = parse_header(os.pread(file, HEADER_BYTES_MAX, offset))
                step = ALIGN_BYTES
                place = None if header is None else self._place(number, offset, header)
                if header and place and offset + header.head_bytes + place.stored_bytes <= end:
                    if not header.is_gone and self._is_readable(header):
                        records.append((header.name, place))
                    step, is_lost = place.record_bytes, False
                elif not is_lost:
                    num_broken += 1
                    is_lost = True
                offset += step
        return Scan(records, num_broken)

    def _place(self, number: int, offset: int, header: Header) -> DiskPlace:
        key_id = header.stamp[KEY_ID]
        key = self._seals.keyring.get(key_id) if self._seals is not None and key_id else None
        return DiskPlace(
            number,
            offset,
            header.num_bytes,
            header.origin,
            header.head_bytes,
            key.id if key is not None else key_id,  # One object for all records of a key.
        )

    def _is_readable(self, header: Header) -> bool:
        if self._seals is None:
            return not header.stamp
        return bool(header.stamp) and self._seals.knows(header.stamp)

    def start(self) -> int:
        """Begin a new segment; return its number."""
        number = self._next
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._open[number] = os.open(self._path(number), flags, 0o600), 0
        if self._seals is not None:
            self._stamps[number] = SegmentStamps(self._seals.keyring)
        self._next += 1
        return number

    def append(
        self,
        number: int,
        name: BlockName,
        data: bytearray | memoryview,
        digest: bytes,
        origin: Origin,
    ) -> DiskPlace:
        """Write a block to a segment that was started and is not sealed.

        Once this returns, the block outlives the process.

        Raises:
            OSError: It cannot be written; nothing of it is left.
        """
        file, offset = self._open[number]
        place = DiskPlace(number, offset, len(data), origin, head_bytes(origin))
        head, stored = record_header(name, len(data), digest, origin), data
        if self._seals is not None:
            seal = self._stamps[number].stamp(origin.tenant)
            head = record_header(name, len(data), bytes(32), origin, MAGIC_SEALED, seal)
            place = DiskPlace(number, offset, len(data), origin, len(head), seal[KEY_ID])
            stored = self._seals.close(seal, data, head + PLACE.pack(number, offset))
        size = place.record_bytes
        parts = [head, stored, bytes(size - len(head) - len(stored))]
        try:
            written = os.pwritev(file, parts, offset)
            if written < size:
                raise OSError(0, f"{written} of {size} bytes were written: the disk is full")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, offset)
            raise
        self._open[number] = file, offset + size
        return place

    def seal(self, but: Collection[int] = ()) -> None:
        """Close segments and write them out, so that they survive a power loss; OSError if one
        cannot be written out.

        Args:
            but: Segments that stay open.
        """
        for number in self._open.keys() - set(but):
            file, _ = self._open.pop(number)
            self._stamps.pop(number, None)
            try:
                os.fdatasync(file)
                # Read once if ever: memory is better used by others.
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def read(self, name: BlockName, place: DiskPlace, into: memoryview) -> bytes | None:
        """Read a block, and note that its segment was used; OSError if it cannot be read.

        Args:
            into: `place.num_bytes` bytes.

        Returns:
            Its digest; None if the bytes have changed.
        """
        head, stored = bytearray(place.head_bytes), into
        if place.key_id and self._seals is not None:
            stored = self._seals.buffer(place.stored_bytes)
        with _opened(self._path(place.segment), os.O_RDONLY) as file:
            count = os.preadv(file, [head, stored], place.offset)
            os.utime(file)
        header = parse_header(head)
        if count < place.head_bytes + len(stored) or header is None or header.is_gone:
            return None
        if (header.name, header.num_bytes, header.origin) != (name, len(into), place.origin):
            return None
        if self._seals is not None:
            bound = bytes(head) + PLACE.pack(place.segment, place.offset)
            is_intact = self._seals.open(header.stamp, stored, bound, into)
            return block_digest(*name, into) if is_intact else None
        return header.digest if block_digest(*name, into) == header.digest else None

    def erase(self, names: Sequence[tuple[BlockName, DiskPlace]]) -> None:
        """Mark records as dropped; once this returns, they do not come back with the next start.

        Harmless for what is marked already, or gone with its segment.

        Raises:
            OSError: Not all could be marked.
        """
        by_segment: dict[int, list[tuple[BlockName, DiskPlace]]] = {}
        for name, place in names:
            by_segment.setdefault(place.segment, []).append((name, place))
        for number, records in by_segment.items():
            with (
                contextlib.suppress(FileNotFoundError),
                _opened(self._path(number), os.O_RDWR) as file,
            ):
                for name, place in records:
                    os.pwrite(file, dropped_header(name, place), place.offset)
                os.fdatasync(file)

    def remove(self, number: int) -> None:
        """Delete a segment; harmless if it is gone; OSError if it cannot be deleted."""
        self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the folder for another pool node."""
        with contextlib.suppress(OSError):
            self.seal()
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:016d}{SUFFIX}"


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _keyring(folder: Path, wrapper: KeyWrapper, lock: int) -> Keyring:
    try:
        return Keyring(folder / FILE_NAME, wrapper)
    except ConfigError:
        os.close(lock)
        raise


def _lose(folder: Path) -> None:
    """Remove a keyring whose wrapping key is gone. The folder is ours already."""
    with contextlib.suppress(FileNotFoundError):
        (folder / FILE_NAME).unlink()
        log_event(_log, logging.WARNING, "disk_emptied", folder=str(folder), why="key is gone")


def _claim(folder: Path, *, is_sealed: bool = False) -> int:
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
        if written not in ("", FORMAT, FORMAT_SEALED):
            raise ConfigError(
                f"{folder} has format {written!r} of the disk tier; this version writes "
                f"{FORMAT!r}: name another folder, or delete this one"
            )
        folder.chmod(0o700)
        if written == FORMAT_SEALED and not is_sealed:
            raise ConfigError(
                f"the blocks in {folder} are sealed; name the file of the site's keys "
                "(`disk_keys`, --disk-keys), or delete the folder and with it its blocks"
            )
        if written != FORMAT_SEALED and is_sealed:
            _empty(folder)
        wanted = FORMAT_SEALED if is_sealed else FORMAT
        if written != wanted:
            os.pwrite(lock, f"{wanted}\n".encode(), 0)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another pool node uses {folder}; name another folder") from None
    except (ConfigError, OSError):
        os.close(lock)
        raise
    return lock


def _empty(folder: Path) -> None:
    """Remove segments in the clear. Whoever is interrupted here does it again."""
    removed = list(folder.glob(f"*{SUFFIX}"))
    for path in removed:
        path.unlink()
    if removed:
        fields = {"folder": str(folder), "files": len(removed)}
        log_event(_log, logging.WARNING, "disk_emptied", why="blocks in the clear", **fields)
