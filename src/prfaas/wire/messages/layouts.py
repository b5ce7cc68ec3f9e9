"""KV layouts as they are announced."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.core.blocks import CacheGroup, GroupKind, Layout
from prfaas.wire.messages.fields import Count, LayoutId, Text


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A cache group as it is announced."""

    index: Count
    kind: GroupKind
    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    window_tokens: Count = 0


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A layout as it is announced."""

    layout_id: LayoutId
    tokens_per_hash: Annotated[int, msgspec.Meta(ge=1)]
    hash_seed: Text
    groups: Annotated[list[GroupSpec], msgspec.Meta(min_length=1, max_length=256)]

    def __post_init__(self) -> None:
        """Refuse blocks that end between two hashes: nothing names them."""
        for group in self.groups:
            if group.tokens_per_block % self.tokens_per_hash:
                raise ValueError(
                    f"cache group {group.index}: tokens_per_block is {group.tokens_per_block}, "
                    f"no multiple of tokens_per_hash, {self.tokens_per_hash}"
                )

    def layout(self) -> Layout:
        """The same, as the core knows it."""
        groups = tuple(
            CacheGroup(g.index, g.kind, g.tokens_per_block, g.block_bytes, g.window_tokens)
            for g in self.groups
        )
        return Layout(self.layout_id, self.tokens_per_hash, self.hash_seed, groups)


def layout_spec(layout: Layout) -> LayoutSpec:
    """A layout, ready to announce."""
    groups = [
        GroupSpec(
            index=g.index,
            kind=g.kind,
            tokens_per_block=g.tokens_per_block,
            block_bytes=g.block_bytes,
            window_tokens=g.window_tokens,
        )
        for g in layout.groups
    ]
    return LayoutSpec(
        layout_id=layout.layout_id,
        tokens_per_hash=layout.tokens_per_hash,
        hash_seed=layout.hash_seed,
        groups=groups,
    )
