"""Names of blocks in 64 bits: what the prefix index remembers of them.

A short key is the end of the block hash, mixed with layout and group. Engines that announce hashes
as numbers announce just these bits. Among ten million blocks two share a short key with a chance of
three in a million; then a hit is predicted that is not there, and costs a miss: blocks themselves
are always named in full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np

from prfaas.core.kv.block_table import Keys
from prfaas.core.kv.blocks import HASH_BYTES

_TAIL = HASH_BYTES // 8
_ODD = 0x9E3779B97F4A7C15
_ONE = np.uint64(1)
_TAIL_MASK = (1 << 64) - 1


@lru_cache(maxsize=256)
def _salt_number(layout_id: bytes, group: int) -> int:
    seed = int.from_bytes(hashlib.sha256(layout_id).digest()[:8], "big")
    return (seed + group * _ODD) & _TAIL_MASK


@lru_cache(maxsize=256)
def _salt(layout_id: bytes, group: int) -> np.uint64:
    return np.uint64(_salt_number(layout_id, group))


def tails(hashes: Sequence[bytes]) -> Keys:
    """The last 64 bits of each 32-byte hash."""
    words = np.frombuffer(b"".join(hashes), ">u8")
    if len(words) != _TAIL * len(hashes):
        raise ValueError(f"a block hash has {HASH_BYTES} bytes")
    return words[_TAIL - 1 :: _TAIL].astype(np.uint64)


def tails_of(hashes: Sequence[int | bytes]) -> Keys:
    """The same of hashes as engines announce them: bytes, or numbers of which the end is looked at.

    Raises:
        ValueError: One has fewer than 8 bytes.
    """
    if set(map(type, hashes)) == {int}:
        with suppress(OverflowError):
            return np.array(hashes, np.uint64)
    return np.array([_tail(block_hash) for block_hash in hashes], np.uint64)


def _tail(block_hash: int | bytes) -> int:
    if isinstance(block_hash, int):
        return block_hash & _TAIL_MASK
    if len(block_hash) < 8:
        raise ValueError(f"a block hash of {len(block_hash)} bytes; 8 are needed")
    return int.from_bytes(block_hash[-8:], "big")


def group_keys(layout_id: bytes, group: int, ends: Keys) -> Keys:
    """Short keys of blocks of one group; never 0."""
    keys: Keys = np.maximum(ends ^ _salt(layout_id, group), _ONE)
    return keys


def short_keys(layout_id: bytes, groups: Sequence[int], counts: Sequence[int], ends: Keys) -> Keys:
    """Short keys of blocks of which so many in a row are of each group; never 0."""
    salts = np.array([_salt(layout_id, group) for group in groups], np.uint64)
    keys: Keys = np.maximum(ends ^ np.repeat(salts, counts), _ONE)
    return keys


def short_key(layout_id: bytes, group: int, block_hash: bytes) -> int:
    """Short key of one block, by group and hash."""
    if len(block_hash) != HASH_BYTES:
        raise ValueError(f"a block hash has {HASH_BYTES} bytes")
    return max(int.from_bytes(block_hash[-8:], "big") ^ _salt_number(layout_id, group), 1)


def short_keys_of(layout_id: bytes, keys: Sequence[tuple[int, bytes]]) -> Keys:
    """Short keys of any blocks of a layout, by group and hash."""
    if not keys:
        return np.zeros(0, np.uint64)
    groups, hashes = zip(*keys, strict=True)
    salts = {group: _salt(layout_id, group) for group in set(groups)}
    mixed = np.fromiter(map(salts.__getitem__, groups), np.uint64, len(groups))
    found: Keys = np.maximum(tails(hashes) ^ mixed, _ONE)
    return found
