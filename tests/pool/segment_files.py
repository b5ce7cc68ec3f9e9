"""Segment files with blocks of known bytes."""

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path

from prfaas.core.kv.blocks import BlockKey, BlockName
from prfaas.pool.store.disk_segments import DiskPlace, SegmentFiles
from prfaas.pool.store.origins import received
from prfaas.wire.fragments import block_digest

LAYOUT_ID = b"L" * 32


ORIGIN = received("prfaas-pool", b"t" * 16, is_inherited=False)


@contextlib.contextmanager
def files_in(folder: Path) -> Iterator[SegmentFiles]:
    files = SegmentFiles(folder)
    try:
        yield files
    finally:
        files.close()


def site_keys(path: Path, *secrets: bytes) -> Path:
    """Write a file of keys of a site; the first one wraps."""
    path.write_bytes(b"\n".join(base64.b64encode(each) for each in secrets))
    path.chmod(0o600)
    return path


def name_of(number: int) -> BlockName:
    return LAYOUT_ID, BlockKey(number % 3, number.to_bytes(32, "big"))


def content(number: int, size: int) -> bytearray:
    return bytearray((number + at) % 251 for at in range(size))


def append(files: SegmentFiles, number: int, size: int) -> DiskPlace:
    name, data = name_of(number), content(number, size)
    return files.append(max(files._open), name, data, block_digest(*name, data), ORIGIN)


def good(files: SegmentFiles, number: int) -> dict[int, bool]:
    """Blocks that a segment says it has, and whether each reads as it was written."""
    read: dict[int, bool] = {}
    for name, place in files.scan(number).records:
        buffer = memoryview(bytearray(place.num_bytes))
        block = int.from_bytes(name[1].block_hash, "big")
        intact = files.read(name, place, buffer) is not None
        assert not intact or buffer == content(block, place.num_bytes)
        read[block] = intact
    return read
