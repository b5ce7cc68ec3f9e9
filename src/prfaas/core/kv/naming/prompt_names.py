"""The hashes that name a prompt's blocks, by the scheme of their layout."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.kv.blocks import HashScheme, Layout
from prfaas.core.kv.hashes import NO_HASHES, Hashes
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.naming.page_chain import page_chain


def prompt_hashes(
    layout: Layout, token_ids: Sequence[int], cache_salt: str | None, known: Hashes = NO_HASHES
) -> Hashes:
    """Return one hash for every `layout.tokens_per_hash` tokens of a prompt.

    Args:
        layout: Names the scheme, its seed and the tokens of a link.
        token_ids: The prompt; ids below 2^32. A trailing partial link gets no hash.
        cache_salt: Secret of the tenant; empty or None for none.
        known: The first hashes of this very prompt, which are not made again.
    """
    span, parent = layout.tokens_per_hash, known[-1] if known else b""
    rest = token_ids[len(known) * span :]
    if layout.hash_scheme is HashScheme.SGLANG_PAGES:
        # vLLM has no empty salt, and the gateway's prompts mean the same at both engines.
        salt = cache_salt or None
        made = page_chain(rest, tokens_per_page=span, cache_salt=salt, parent=parent)
    else:
        seed = layout.hash_seed
        made = hash_chain(
            rest, tokens_per_hash=span, seed=seed, cache_salt=cache_salt, parent=parent
        )
    return Hashes(known.data + b"".join(made))
