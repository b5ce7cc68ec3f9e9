"""Announced KV layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from prfaas.core.kv.blocks import (
    DTYPE_CHARS_MAX,
    FACTS_MAX,
    NAME_CHARS_MAX,
    PLANES_MAX,
    VALUE_CHARS_MAX,
    GroupKind,
    HashScheme,
    KvPage,
    Layout,
)
from prfaas.wire.messages.fields import GROUPS_MAX, Count, LayoutId, Text

FactName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"\A[A-Za-z0-9_.-]+\Z")
]
FactValue = Annotated[str, msgspec.Meta(max_length=VALUE_CHARS_MAX, pattern=r"\A[ -~]*\Z")]
FactMap = Annotated[dict[FactName, FactValue], msgspec.Meta(max_length=FACTS_MAX)]
"""Facts behind a layout id: printable ASCII, so that they can be shown as they are."""
MODEL_CHARS_MAX = 160
ModelWords = Annotated[str, msgspec.Meta(max_length=MODEL_CHARS_MAX, pattern=r"\A[ -~]*\Z")]
FACTS_BYTES_MAX = 1 << 20
"""Names and values of all facts in one message; layouts beyond it go without."""
LAYOUTS_MAX = 64
"""Layouts whose facts one message holds; a pool node that has more engines has few models."""


Dtype = Annotated[
    str, msgspec.Meta(min_length=1, max_length=DTYPE_CHARS_MAX, pattern=r"\A[A-Za-z0-9_.-]+\Z")
]
PlaneSpec = tuple[Dtype, Annotated[int, msgspec.Meta(ge=1, le=2**53)]]
"""Name of a type, and bytes."""
_Size = Annotated[int, msgspec.Meta(ge=1, le=2**28)]
PageSpec = tuple[_Size, _Size, _Size, _Size, _Size, bool]
"""Layers, tokens, heads, key size, value size, and whether tokens come before heads."""


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A cache group as it is announced; an older engine announces no planes and no
    pages."""

    index: Count
    kind: GroupKind
    tokens_per_block: Annotated[int, msgspec.Meta(ge=1)]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    window_tokens: Count = 0
    planes: Annotated[list[PlaneSpec], msgspec.Meta(max_length=PLANES_MAX)] = []
    pages: Annotated[list[PageSpec], msgspec.Meta(max_length=PLANES_MAX)] = []

    def __post_init__(self) -> None:
        """Reject planes and pages that are not the block."""
        num_bytes = sum(size for _, size in self.planes)
        if self.planes and num_bytes != self.block_bytes:
            raise ValueError(
                f"cache group {self.index}: block_bytes is {self.block_bytes}, "
                f"its dtype planes have {num_bytes}"
            )
        num_bytes = sum(KvPage(*page).num_bytes for page in self.pages)
        if self.pages and num_bytes != self.block_bytes:
            raise ValueError(
                f"cache group {self.index}: block_bytes is {self.block_bytes}, "
                f"its keys and values have {num_bytes}"
            )


class LayoutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An announced layout; an older engine names no scheme, and hashes as vLLM does."""

    layout_id: LayoutId
    tokens_per_hash: Annotated[int, msgspec.Meta(ge=1)]
    hash_seed: Text
    groups: Annotated[list[GroupSpec], msgspec.Meta(min_length=1, max_length=GROUPS_MAX)]
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR

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
        return msgspec.convert(self, Layout, from_attributes=True)


class LayoutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts behind a layout id, and the model in words, such as `org/name@commit`."""

    layout_id: LayoutId
    facts: FactMap
    model: ModelWords = ""

    @property
    def num_bytes(self) -> int:
        """Size of names and values."""
        return sum(len(name) + len(value) for name, value in self.facts.items())


def bounded(found: Iterable[LayoutFacts]) -> list[LayoutFacts]:
    """Return each layout once, as many as a message may hold."""
    once: dict[bytes, LayoutFacts] = {}
    num_bytes = 0
    for each in found:
        fits = len(once) < LAYOUTS_MAX and num_bytes + each.num_bytes <= FACTS_BYTES_MAX
        if each.facts and each.layout_id not in once and fits:
            once[each.layout_id] = each
            num_bytes += each.num_bytes
    return list(once.values())


def layout_spec(layout: Layout) -> LayoutSpec:
    """A layout, ready to announce."""
    return msgspec.convert(layout, LayoutSpec, from_attributes=True)
