"""The hash chain that names blocks: SHA-256 over canonical CBOR, as vLLM's `sha256_cbor`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import cbor2
import numpy as np

_LINK = cbor2.dumps([None] * 3, canonical=True)[:1]
_PARENT = cbor2.dumps(bytes(32), canonical=True)[:2]
_KEPT = np.array(
    [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
    ],
    dtype=np.bool_,
)
"""Bytes of an integer's CBOR encoding by size: its head and up to four bytes, padded to a word for
faster copies."""
_SIZES = _KEPT.sum(axis=1)
_KEPT_WORDS = _KEPT.view(np.uint64)[:, 0]
PIECE_IDS = 4096
"""Token ids that are encoded at a time: what that takes stays in the cache of a core."""
_NOTHING = cbor2.dumps(None, canonical=True)


def hash_chain(
    token_ids: Sequence[int],
    *,
    tokens_per_hash: int,
    seed: str,
    cache_salt: str | None,
    parent: bytes = b"",
) -> list[bytes]:
    """Block hashes of a prompt: each covers all tokens up to its end.

    Args:
        token_ids: The prompt; ids below 2^32.
        tokens_per_hash: Tokens per link; a trailing partial link gets no hash.
        seed: The engines' hash seed.
        cache_salt: The tenant's secret, mixed into the first link and so into all; None for none.
        parent: Last hash of the chain that these tokens continue; empty at the start of a prompt.

    Returns:
        One 32-byte hash for every `tokens_per_hash` tokens.

    References:
        vLLM 0.32, `vllm/v1/core/kv_cache_utils.py`: `init_none_hash`, `hash_block_tokens`,
        `generate_block_hash_extra_keys`.
    """
    count = len(token_ids) // tokens_per_hash
    if not count:
        return []
    salted = (("cache_salt", cache_salt),) if cache_salt and not parent else None
    parent = parent or hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()
    head, extra = _head(tokens_per_hash), cbor2.dumps(salted, canonical=True)
    hashes: list[bytes] = []
    total, step = count * tokens_per_hash, max(1, PIECE_IDS // tokens_per_hash) * tokens_per_hash
    for first in range(0, total, step):
        links, ends = _written(token_ids[first : min(first + step, total)], tokens_per_hash)
        start = 0
        for end in ends:
            link = b"".join((_LINK, _PARENT, parent, head, links[start:end], extra))
            parent = hashlib.sha256(link).digest()
            hashes.append(parent)
            start, extra = end, _NOTHING
    return hashes


def _head(length: int) -> bytes:
    """CBOR header of an array of that length."""
    first, *rest = cbor2.dumps(length, canonical=True)
    return bytes((first | 0x80, *rest))


def _written(token_ids: Sequence[int], tokens_per_hash: int) -> tuple[bytes, list[int]]:
    """The integers one after the other, and where every link of them ends, bytes."""
    ids = np.frombuffer(array("I", token_ids), dtype=np.uint32)
    size = (ids >= 24).astype(np.uint8) + (ids >= 2**8) + (ids >= 2**16)
    heads = np.where(size == 0, ids, 23 + size)
    swapped = ids.astype(">u4").view("<u4")
    words = (swapped.astype("<u8") << 8 | heads).astype("<u8", copy=False)
    kept = np.compress(_KEPT_WORDS.take(size).view(np.bool_), words.view(np.uint8))
    ends = _SIZES.take(size).reshape(-1, tokens_per_hash).sum(axis=1).cumsum()
    return kept.tobytes(), ends.tolist()
