"""Pages of SGLang's host memory as rows of shared memory.

SGLang allocates a host pool in one piece. With the `shm` allocator that is an anonymous file, whose
descriptor goes to the pool node. A page lies in it in one or several parts: keys and values of all
layers in two, or every layer in a part of its own. The parts of the next page begin at a constant
distance, so one description holds for all pages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.errors import ConfigError

ALLOCATOR = '"allocator": "shm"'


@dataclass(frozen=True, slots=True)
class HostRows:
    """Where the pages of a host pool lie in its file.

    Attributes:
        descriptor: Of the file; SGLang's.
        stride: Distance of two pages, bytes.
        parts: Offset and length of the parts of the first page, bytes, in SGLang's order.
    """

    descriptor: int
    page_tokens: int
    num_pages: int
    stride: int
    parts: tuple[tuple[int, int], ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(length for _, length in self.parts)

    @property
    def span(self) -> int:
        """Distance from the begin of a page's first part to the end of its last, bytes."""
        return max(offset + length for offset, length in self.parts)

    def pages(self, indices: Sequence[int], num: int) -> list[int] | None:
        """Numbers of pages.

        Args:
            indices: SGLang's host indices, one a token.
            num: Pages that there should be.

        Returns:
            None if the indices are not those of so many whole pages of this pool.
        """
        if len(indices) != num * self.page_tokens:
            return None
        firsts = indices[:: self.page_tokens]
        found = [first // self.page_tokens for first in firsts]
        if any(first % self.page_tokens for first in firsts):
            return None
        return found if all(0 <= page < self.num_pages for page in found) else None


def host_rows(pool: Any, name: str) -> HostRows:
    """Describe a host pool of SGLang (`HostKVCache`).

    Args:
        name: Of the pool, for messages.

    Raises:
        ConfigError: It is not in shared memory, or its pages do not lie at equal distances in it.
    """
    descriptor = getattr(pool, "fd", None)
    if descriptor is None:
        raise ConfigError(
            f"the host pool {name!r} is not in shared memory; add {ALLOCATOR} to "
            "--hicache-storage-backend-extra-config"
        )
    page_tokens, num_pages = int(pool.page_size), int(pool.size) // int(pool.page_size)
    base, size = pool.kv_buffer.data_ptr(), os.fstat(descriptor).st_size
    first, second = (_parts(pool, page, page_tokens, base) for page in (0, min(1, num_pages - 1)))
    stride = second[0][0] - first[0][0] or size
    moved = tuple((offset + stride, length) for offset, length in first)
    rows = HostRows(descriptor, page_tokens, num_pages, stride, first)
    is_whole = (num_pages - 1) * stride + rows.span <= size
    if stride < 1 or first[0][0] or (num_pages > 1 and moved != second) or not is_whole:
        raise ConfigError(
            f"the pages of host pool {name!r} ({getattr(pool, 'layout', '?')}) are not at equal "
            "distances in one file; start SGLang with --hicache-mem-layout page_first_direct"
        )
    return rows


def _parts(pool: Any, page: int, page_tokens: int, base: int) -> tuple[tuple[int, int], ...]:
    """Offset in the file and length of every part of a page."""
    import torch

    start = page * page_tokens
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(start, start + page_tokens))
    return tuple((int(at) - base, int(n)) for at, n in zip(pointers, sizes, strict=True))
