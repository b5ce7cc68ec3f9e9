"""The block hashes of a prompt as one object: a garbage collection has no list of them to walk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from prfaas.core.kv.blocks import HASH_BYTES


class Hashes(Sequence[bytes]):
    """Hashes of HASH_BYTES, one behind the other in `data`."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Hashes: ...
    def __getitem__(self, index: int | slice) -> bytes | Hashes:
        if isinstance(index, slice):
            data, (start, stop, step) = self.data, index.indices(len(self))
            if step == 1:
                return Hashes(data[start * HASH_BYTES : stop * HASH_BYTES])
            places = range(start * HASH_BYTES, stop * HASH_BYTES, step * HASH_BYTES)
            return Hashes(b"".join([data[at : at + HASH_BYTES] for at in places]))
        start = range(0, len(self.data), HASH_BYTES)[index]
        return self.data[start : start + HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.data), HASH_BYTES):
            yield self.data[start : start + HASH_BYTES]

    def __eq__(self, other: object) -> bool:
        return self.data == other.data if isinstance(other, Hashes) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.data)


NO_HASHES = Hashes()


def joined(hashes: Sequence[bytes]) -> bytes:
    """Return hashes one behind the other."""
    return hashes.data if isinstance(hashes, Hashes) else b"".join(hashes)
