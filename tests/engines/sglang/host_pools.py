"""Host pools as SGLang's: pages in one file of shared memory, in one or several parts."""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")


class HostPool:
    """The part that storage backends see of SGLang's `HostKVCache`.

    Args:
        page_size: Tokens of a page.
        num_pages: Pages.
        num_parts: Parts of a page: 1 is MLA, 2 keys and values, more are layers.
        part_bytes: Bytes of a part.
        layout: SGLang's name of the order.
    """

    start_layer, end_layer = 0, 4
    storage_format_tag = None

    def __init__(
        self,
        page_size: int = 16,
        num_pages: int = 40,
        num_parts: int = 2,
        part_bytes: int = 96,
        layout: str = "page_first_direct",
    ) -> None:
        self.page_size, self.num_pages, self.size = page_size, num_pages, page_size * num_pages
        self.num_parts, self.part_bytes, self.layout = num_parts, part_bytes, layout
        self.dtype = torch.bfloat16
        self.fd: int | None = os.memfd_create("host_pool")
        num_bytes = num_parts * num_pages * part_bytes
        os.truncate(self.fd, num_bytes)
        self._memory = mmap.mmap(self.fd, num_bytes)
        self.kv_buffer = torch.frombuffer(self._memory, dtype=torch.uint8)

    def close(self) -> None:
        del self.kv_buffer
        if self.fd is not None:
            os.close(self.fd)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and lengths of the parts of pages."""
        pages = [index // self.page_size for index in indices.tolist()[:: self.page_size]]
        base = self.kv_buffer.data_ptr()
        at = [base + start for page in pages for start in self._starts(page)]
        return at, [self.part_bytes] * len(at)

    def _starts(self, page: int) -> list[int]:
        whole = self.num_pages * self.part_bytes
        return [part * whole + page * self.part_bytes for part in range(self.num_parts)]

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        starts = self._starts(index // self.page_size)
        parts = [self.kv_buffer[start : start + self.part_bytes] for start in starts]
        return torch.cat(parts)

    def set_from_flat_data_page(self, index: int, data: Any) -> None:
        for at, start in enumerate(self._starts(index // self.page_size)):
            part = data[at * self.part_bytes : (at + 1) * self.part_bytes]
            self.kv_buffer[start : start + self.part_bytes] = part

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(self.num_parts * self.part_bytes, dtype=torch.uint8)

    def page(self, page: int) -> bytes:
        """The bytes of a page."""
        return bytes(self.get_data_page(page * self.page_size).tolist())

    def fill(self, page: int, name: str) -> bytes:
        """Compute a page."""
        data = hashlib.shake_128(name.encode()).digest(self.num_parts * self.part_bytes)
        self.set_from_flat_data_page(page * self.page_size, torch.tensor(list(data)))
        return data

    def indices(self, pages: list[int]) -> Any:
        """SGLang's host indices of pages."""
        size = self.page_size
        return torch.tensor([page * size + at for page in pages for at in range(size)])
