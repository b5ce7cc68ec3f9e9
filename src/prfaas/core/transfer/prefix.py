"""The beginning of a prompt as blocks with names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import BlockKey, Layout, block_key
from prfaas.core.kv.shipping import is_worth_sending


@dataclass(frozen=True)
class Prefix(Sequence[bytes]):
    """The beginning of a prompt: at every boundary the hash that names all before it.

    Attributes:
        layout: Of its blocks.
        hashes: Hash chain, up to where it ends.
        tenant: Name of the tenant of the prefix.
        quality: Class of its blocks.
    """

    layout: Layout
    hashes: Sequence[bytes]
    tenant: str
    quality: Quality = Quality.LOSSLESS

    @property
    def step(self) -> int:
        """Hashes between two boundaries."""
        return self.layout.boundary_tokens // self.layout.tokens_per_hash

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self) * self.layout.boundary_tokens

    def __len__(self) -> int:
        return len(self.hashes) // self.step

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Prefix: ...
    def __getitem__(self, index: int | slice) -> bytes | Prefix:
        if isinstance(index, int):
            if not 0 <= index < len(self):
                raise IndexError(f"boundary {index} of {len(self)}")
            return self.hashes[(index + 1) * self.step - 1]
        end = index.indices(len(self))[1]
        return Prefix(self.layout, self.hashes[: end * self.step], self.tenant, self.quality)

    def keys(self, have_tokens: int) -> Iterator[BlockKey]:
        """Blocks of it that a pool with so much of it can use and lacks."""
        final = self.num_tokens
        for group in self.layout.groups:
            span = group.tokens_per_block
            for end in range(have_tokens + span, final + 1, span):
                if is_worth_sending(group, end, have_tokens=have_tokens, final_tokens=final):
                    yield block_key(self.layout, group, self.hashes, end)
