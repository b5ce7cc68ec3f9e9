"""Names of KV blocks, and the layout in which those names mean bytes.

A block is named by its cache group and its block hash. The hash is chained over the tokens from the
start of the prompt and salted per tenant, so equal names mean equal content within one layout.

Dtype planes: which parts of a block hold numbers of which type.

A block is the data of all layers of its cache group, one after the other. Attention in bfloat16 is
one plane; a layer of linear state is often two, a convolution in bfloat16 and a state in float32.
Planes are a hint for codecs: a wrong one costs ratio, never a byte.

The facts behind a layout id, and what differs between those of two engines.

A fact is a short name with a short text as its value, such as `cache_dtype` with `bfloat16`. The
layout id is a digest of all facts of an engine. Ids are compared to decide, and facts to explain:
ids that differ have at least one fact that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm
from typing import NamedTuple

PLANES_MAX = 512
"""Planes of one group. A group with more is announced without."""
DTYPE_CHARS_MAX = 32


class Plane(NamedTuple):
    """Neighbouring numbers of one type."""

    dtype: str
    """Name of the type as in PyTorch, such as `bfloat16`."""
    num_bytes: int
    """Size, at least 1."""


class KvPage(NamedTuple):
    """Keys and values of neighbouring layers that are alike: for each head and token, the key and
    then the value, in bfloat16."""

    layers: int
    tokens: int
    heads: int
    key_size: int
    value_size: int
    is_token_major: bool
    """True if a token has all heads together, False if a head has all tokens."""

    @property
    def num_bytes(self) -> int:
        """Size of all layers."""
        return 2 * self.layers * self.tokens * self.heads * (self.key_size + self.value_size)


Planes = tuple[Plane, ...]
"""The planes of a block, in order; empty if they are not known."""


def merged(planes: Iterable[Plane]) -> Planes:
    """Join neighbours of one type; return no planes at all if more than PLANES_MAX are left."""
    found: list[Plane] = []
    for dtype, num_bytes in planes:
        if found and found[-1].dtype == dtype:
            found[-1] = Plane(dtype, found[-1].num_bytes + num_bytes)
        elif num_bytes:
            found.append(Plane(dtype, num_bytes))
    return tuple(found) if len(found) <= PLANES_MAX else ()


def part(planes: Planes, offset: int, num_bytes: int) -> Planes:
    """Return the planes of `num_bytes` bytes of a block from `offset` on."""
    found: list[Plane] = []
    end, start = offset + num_bytes, 0
    for dtype, size in planes:
        inside = min(end, start + size) - max(offset, start)
        if inside > 0:
            found.append(Plane(dtype, inside))
        start += size
        if start >= end:
            break
    return tuple(found)


HASH_BYTES = 32
LAYOUT_ID_BYTES = 32


class GroupKind(StrEnum):
    """Rule for the reuse of a cache group's blocks."""

    FULL_ATTENTION = "full_attention"
    """One block per block of tokens; any leading run of blocks is a hit."""
    SLIDING_WINDOW = "sliding_window"
    """Only the last window before the hit boundary has to be there."""
    LINEAR_STATE = "linear_state"
    """One block per checkpoint, usable at exactly the length it was taken at."""


class HashScheme(StrEnum):
    """Rule by which an engine names blocks. Layouts of different schemes have different ids."""

    SHA256_CBOR = "sha256_cbor"
    """vLLM's (`hash_chain.py`)."""
    SGLANG_PAGES = "sglang_pages"
    """SGLang's (`page_chain.py`)."""


class BlockKey(NamedTuple):
    """Name of a block within one layout."""

    group: int
    block_hash: bytes


BlockName = tuple[bytes, BlockKey]
"""Layout id and key: the name of a block among all there are."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table."""

    index: int
    """The engine's number of the group."""
    kind: GroupKind
    """How its blocks may be reused."""
    tokens_per_block: int
    block_bytes: int
    """Bytes of one block as it is shipped, padding left out."""
    window_tokens: int = 0
    """Length of the window, the token that attends included; 0 unless `kind` is SLIDING_WINDOW."""
    planes: Planes = ()
    """Dtype planes of a block, `block_bytes` together; empty if they are not known."""
    pages: tuple[KvPage, ...] = ()
    """Keys and values of a block, `block_bytes` together; empty if they cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts that have to agree before two engines can use each other's blocks."""

    layout_id: bytes
    """Digest over weights, tokenizer, chat template, dtype and cache groups; 32 bytes."""
    tokens_per_hash: int
    """Tokens covered by one link of the hash chain."""
    hash_seed: str
    """Seed that the first link of the chain is derived from."""
    groups: tuple[CacheGroup, ...]
    """The cache groups, in the engine's order."""
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR
    """Rule of the hash chain."""
    checkpoint_tokens: int = 0
    """Least distance of intermediate states that transfers ship; 0 is none. A deployment's, not the
    engine's (`checkpoints.py`)."""

    @property
    def takes_orders(self) -> bool:
        """Return True if engines with such blocks push them and wait for them, as requests order.

        SGLang passes nothing of a request to its storage.
        """
        return self.hash_scheme is not HashScheme.SGLANG_PAGES

    @property
    def boundary_tokens(self) -> int:
        """Smallest length, tokens, at which every group ends a block."""
        return lcm(*(group.tokens_per_block for group in self.groups))

    def last_boundary(self, num_tokens: int) -> int:
        """Longest reusable prefix of a prompt: the last token always has to be computed."""
        return max(0, num_tokens - 1) // self.boundary_tokens * self.boundary_tokens

    def last_whole_block(self, num_tokens: int) -> int:
        """End of the last block that a prompt fills in every group, tokens."""
        spans = [group.tokens_per_block for group in self.groups]
        return min(num_tokens // span * span for span in spans)


def block_key(
    layout: Layout, group: CacheGroup, hashes: Sequence[bytes], end_token: int
) -> BlockKey:
    """Name of the block of `group` that ends at `end_token`.

    Args:
        layout: The layout that `hashes` were made for.
        hashes: Hash chain of the prompt, one entry per `layout.tokens_per_hash` tokens.
        end_token: A multiple of the group's block span, at most the length the chain covers.
    """
    return BlockKey(group.index, hashes[end_token // layout.tokens_per_hash - 1])


Facts = Mapping[str, str]
"""Values by name, the most telling names first."""

FACTS_MAX = 1024
NAME_CHARS_MAX = 128
VALUE_CHARS_MAX = 160
ABSENT = "(none)"
"""Value of a fact that only the other side has."""
DEFAULTS = {"hash_scheme": HashScheme.SHA256_CBOR.value}
"""Values of facts that an engine leaves out: a new fact would change all layout ids."""
UNKNOWN = "an older prfaas sends no facts, or the ids are made by different rules"


def facts_id(facts: Facts) -> bytes:
    """Return the layout id of an engine with these facts, 32 bytes; their order does not count."""
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


class Difference(NamedTuple):
    """A fact that differs between two engines."""

    fact: str
    ours: str
    """Value at the first engine; its default or `ABSENT` if it has none."""
    theirs: str
    """Value at the second engine."""


def differences(ours: Facts, theirs: Facts) -> list[Difference]:
    """Return the facts that differ, in the order of `ours`, then those that `theirs` alone has."""
    names = dict.fromkeys([*ours, *theirs])
    absent = {name: DEFAULTS.get(name, ABSENT) for name in names}
    pairs = ((name, ours.get(name, absent[name]), theirs.get(name, absent[name])) for name in names)
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def in_words(found: Sequence[Difference], our_name: str, their_name: str, limit: int = 3) -> str:
    """Return the first differences as a sentence, such as `dtype: A at pd, B at prfaas`.

    Args:
        found: What differs; empty if it is not known.
        our_name: Name of the engine that `ours` is from.
        their_name: Name of the other engine.
        limit: Number of differences that are written out.
    """
    if not found:
        return f"{our_name} and {their_name}: {UNKNOWN}"
    shown = [f"{d.fact}: {d.ours} at {our_name}, {d.theirs} at {their_name}" for d in found[:limit]]
    rest = len(found) - limit
    return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")
