"""The hash chain that names pages of SGLang: SHA-256 over the parent and the page's token ids.

A page is `SHA-256(parent digest, token ids as little-endian 32-bit words)`. The first page has no
parent, or the seed of a namespace: a cache salt, an extra key, or both.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

_NAMESPACE = b"sglang-cache-namespace-v1"
_TOKEN_BYTES = 4


def page_chain(
    token_ids: Sequence[int],
    *,
    tokens_per_page: int,
    cache_salt: str | None,
    extra_key: str | None = None,
    parent: bytes = b"",
) -> list[bytes]:
    """Hashes of the whole pages of a prompt: each covers all tokens up to its end.

    Args:
        token_ids: The prompt; ids below 2^32.
        tokens_per_page: Tokens of a page; a trailing part of a page gets no hash.
        cache_salt: Secret of the tenant; None for none, which differs from an empty one.
        extra_key: SGLang's `extra_key` of the request; None for none.
        parent: Last hash of the chain that these tokens continue; empty at the start of a prompt.

    Returns:
        One 32-byte hash a page.

    References:
        SGLang 0.5.23, `sglang/srt/mem_cache/utils.py`: `storage_namespace_seed`,
        `get_storage_hash_str`; `cpp_utils/hash_binding.cpp`: `hash_pages_to_hex_blob`.
    """
    count = len(token_ids) // tokens_per_page
    ids = np.frombuffer(array("I", token_ids[: count * tokens_per_page]), dtype=np.uint32)
    words, size = ids.astype("<u4", copy=False).tobytes(), tokens_per_page * _TOKEN_BYTES
    parent = parent or namespace_seed(extra_key, cache_salt)
    hashes: list[bytes] = []
    for start in range(0, count * size, size):
        parent = hashlib.sha256(parent + words[start : start + size]).digest()
        hashes.append(parent)
    return hashes


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return the parent of the first page; empty without a namespace."""
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(_NAMESPACE)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            data = part.encode()
            digest.update(b"\1" + len(data).to_bytes(8, "little") + data)
    return digest.digest()
