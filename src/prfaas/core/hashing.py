"""The hash chain that names blocks: SHA-256 over canonical CBOR, as vLLM's `sha256_cbor`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import cbor2


def _digest(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def hash_chain(
    token_ids: Sequence[int],
    *,
    tokens_per_hash: int,
    seed: str,
    cache_salt: str | None,
    known: Sequence[bytes] = (),
) -> list[bytes]:
    """Block hashes of a prompt: each covers all tokens up to its end.

    Args:
        token_ids: The prompt.
        tokens_per_hash: Tokens per link; a trailing partial link gets no hash.
        seed: The engines' hash seed.
        cache_salt: The tenant's secret, mixed into the first link and so into all; None for none.
        known: The first hashes of this very chain, if they were made before.

    Returns:
        One 32-byte hash for every `tokens_per_hash` tokens.

    References:
        vLLM 0.32, `vllm/v1/core/kv_cache_utils.py`: `init_none_hash`, `hash_block_tokens`,
        `generate_block_hash_extra_keys`.
    """
    parent = known[-1] if known else _digest(seed)
    extra: tuple[tuple[str, str], ...] | None = (
        (("cache_salt", cache_salt),) if cache_salt and not known else None
    )
    hashes = list(known)
    first = len(known) * tokens_per_hash
    for start in range(first, len(token_ids) - tokens_per_hash + 1, tokens_per_hash):
        link = tuple(token_ids[start : start + tokens_per_hash])
        parent = _digest((parent, link, extra))
        hashes.append(parent)
        extra = None
    return hashes
