"""The hashes that name a prompt's blocks, by the scheme of their layout."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.kv.blocks import HashScheme, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.naming.page_chain import page_chain


def prompt_hashes(layout: Layout, token_ids: Sequence[int], cache_salt: str | None) -> list[bytes]:
    """Return one hash for every `layout.tokens_per_hash` tokens of a prompt.

    Args:
        layout: Names the scheme, its seed and the tokens of a link.
        token_ids: The prompt; ids below 2^32. A trailing partial link gets no hash.
        cache_salt: Secret of the tenant; empty or None for none.
    """
    if layout.hash_scheme is HashScheme.SGLANG_PAGES:
        # vLLM has no empty salt, and the gateway's prompts mean the same at both engines.
        span = layout.tokens_per_hash
        return page_chain(token_ids, tokens_per_page=span, cache_salt=cache_salt or None)
    return hash_chain(
        token_ids,
        tokens_per_hash=layout.tokens_per_hash,
        seed=layout.hash_seed,
        cache_salt=cache_salt,
    )
