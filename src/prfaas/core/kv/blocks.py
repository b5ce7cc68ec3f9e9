"""Names of KV blocks, and the layout in which those names mean bytes.

A block is named by its cache group and its block hash. The hash is chained over the tokens from the
start of the prompt and salted per tenant, so equal names mean equal content within one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm
from typing import NamedTuple

from prfaas.core.kv.planes import KvPage, Planes

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
    """Layers that share a block table.

    Attributes:
        index: The engine's number of the group.
        kind: How its blocks may be reused.
        block_bytes: Bytes of one block as it is shipped, padding left out.
        window_tokens: Length of the window, the token that attends included; 0 unless `kind` is
            SLIDING_WINDOW.
        planes: Dtype planes of a block, `block_bytes` together; empty if they are not known.
        pages: Keys and values of a block, `block_bytes` together; empty if they cannot be told
            apart.
    """

    index: int
    kind: GroupKind
    tokens_per_block: int
    block_bytes: int
    window_tokens: int = 0
    planes: Planes = ()
    pages: tuple[KvPage, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts that have to agree before two engines can use each other's blocks.

    Attributes:
        layout_id: Digest over weights, tokenizer, chat template, dtype and cache groups; 32 bytes.
        tokens_per_hash: Tokens covered by one link of the hash chain.
        hash_seed: Seed that the first link of the chain is derived from.
        groups: The cache groups, in the engine's order.
        hash_scheme: Rule of the hash chain.
        checkpoint_tokens: Least distance of intermediate states that transfers ship; 0 is none.
            A deployment's, not the engine's (`checkpoints.py`).
    """

    layout_id: bytes
    tokens_per_hash: int
    hash_seed: str
    groups: tuple[CacheGroup, ...]
    hash_scheme: HashScheme = HashScheme.SHA256_CBOR
    checkpoint_tokens: int = 0

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
