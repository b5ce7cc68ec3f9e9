"""Marks of purges in a bucket: what was written before them is refused, also if it comes back.

    PREFIX/purges/SCOPE/TIME    one mark: source, tenant or hashes of a purge, sealed by a site key

That a deleted object is gone is the word of the server: a bucket with versioning, a restored one,
or a server that answers and does nothing brings it back. Times are those of creation in names of
packs, which are bound to their content. A node that has read a mark keeps it, and writes it again
if the bucket loses it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from prfaas.core.cache.keep_rules import Origin, PurgeTimes, Scope
from prfaas.core.kv.blocks import BlockName
from prfaas.pool.keys.sealing import HEAD_BYTES, AlteredError, UnknownKeyError, new_seal, seal_of
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.packs import PackedBlock, PackName

FOLDER = "purges"
KIND = b"PFSM\x01"
MARKS_MAX = 4096
"""Marks that are kept: the newest."""
MARK_BYTES_MAX = 8 << 20
_MS_PER_S = 1000
_PATH = re.compile(rf"{FOLDER}/([0-9a-f]{{32}})/([0-9a-f]{{12}})")


class _Mark(msgspec.Struct, array_like=True, frozen=True):
    at_ms: int
    source: str = ""
    tenant: str | None = None
    hashes: frozenset[bytes] = frozenset()


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Mark)


class PurgeMarks:
    """The purges that the nodes of a site know of. Lives on one event loop.

    Args:
        limit_s: Limit of each request, seconds.
    """

    def __init__(self, bucket: Bucket, keys: KeyRing, limit_s: float) -> None:
        self._bucket, self._keys, self._limit_s = bucket, keys, limit_s
        self._marks: dict[str, _Mark] = {}
        """By path."""
        self._unreadable: set[str] = set()
        self._times = PurgeTimes()
        self._hashes: dict[bytes, int] = {}

    async def add(self, scope: Scope, at_ms: int) -> None:
        """Refuse from now on what was written until a time, ms since 1970.

        Raises:
            TransferError: The mark could not be written. It counts at this node all the same.
        """
        tenant = scope.tenant if scope.hashes is None else None
        mark = _Mark(at_ms, scope.source, tenant, scope.hashes or frozenset())
        digest = hashlib.sha256(_encoder.encode(_named(mark))).hexdigest()[:32]
        path = f"{FOLDER}/{digest}/{at_ms:012x}"
        older = [each for each in self._marks if each.startswith(f"{FOLDER}/{digest}/")]
        if max(older, default="") > path:
            return
        self._know(path, mark)
        await self._write(path, mark)
        await self._bucket.delete([each for each in older if each != path], self._limit_s)
        for each in older:
            self._marks.pop(each, None)
        self._marks[path] = mark

    async def follow(self, paths: Iterable[str]) -> bool:
        """Read the marks of a list of the bucket that are new, and write those that it has lost.

        Returns:
            True if a mark is new.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        found = {path for path in paths if _PATH.fullmatch(path)}
        newest = sorted(found, key=lambda path: path[-12:])[-MARKS_MAX:]
        new = [path for path in newest if path not in self._marks and path not in self._unreadable]
        for path in new:
            await self._read(path)
        for path, mark in list(self._marks.items()):
            if path not in found:
                await self._write(path, mark)
        return bool(new)

    def refuses(self, pack: PackName, name: BlockName, origin: Origin) -> bool:
        """Return True if a block was written before a purge of its source, tenant or name."""
        if pack.at_ms <= self._hashes.get(name[1].block_hash, 0):
            return True
        return self._times.is_before(origin, pack.at_ms, pack.writer)

    def kept(
        self, pack: PackName, blocks: Mapping[BlockName, PackedBlock]
    ) -> dict[BlockName, PackedBlock]:
        """The blocks of a pack that no purge refuses."""
        if not self._marks:
            return dict(blocks)
        return {
            name: block
            for name, block in blocks.items()
            if not self.refuses(pack, name, block.origin)
        }

    def not_before_s(self, tenant: str) -> int:
        """Return the first second in which a key of a tenant can be made; 0 without a purge."""
        at_ms = self._times.of_tenant(tenant)
        return int(at_ms) // _MS_PER_S + 1 if at_ms else 0

    def _know(self, path: str, mark: _Mark) -> None:
        self._marks[path] = mark
        if len(self._marks) > MARKS_MAX:
            del self._marks[min(self._marks, key=lambda each: each[-12:])]
        if mark.tenant is not None or mark.source:
            self._times.note(Scope(mark.source, mark.tenant), mark.at_ms)
        for each in mark.hashes:
            self._hashes[each] = max(mark.at_ms, self._hashes.get(each, 0))

    async def _write(self, path: str, mark: _Mark) -> None:
        seal = new_seal(KIND, self._keys.sealing)
        data = seal.head + seal.close(0, _encoder.encode(mark), path.encode())
        await self._bucket.write(path, data, self._limit_s)

    async def _read(self, path: str) -> None:
        """A mark that this node cannot read is of no site that it belongs to."""
        try:
            data = await self._bucket.read(path, 0, MARK_BYTES_MAX, self._limit_s)
            seal = seal_of(KIND, data, self._keys)
            mark = _decoder.decode(seal.open(0, data[HEAD_BYTES:], path.encode()))
        except GoneError:
            return
        except (AlteredError, UnknownKeyError, msgspec.DecodeError):
            self._unreadable.add(path)
        else:
            self._know(path, mark)


def _named(mark: _Mark) -> list[object]:
    return [mark.source, mark.tenant, sorted(mark.hashes)]
