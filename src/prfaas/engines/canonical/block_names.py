"""Names of the blocks of a request whose blocks are longer than those that its engine hashes.

An engine chains a hash over the tokens of each of its own blocks. Engines with blocks of other
lengths name the same tokens differently. Shared blocks therefore have the names of one chain, with
a link for each shared block, which every such engine computes from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.naming.hash_chain import hash_chain


class BlockNames:
    """The chain of one request, as long as it was asked for.

    Args:
        layout: Of the shared blocks.
        token_ids: Prompt and answer; may grow.
        cache_salt: Of the request; None for none.
    """

    def __init__(self, layout: Layout, token_ids: Sequence[int], cache_salt: str | None) -> None:
        self._layout, self._token_ids, self._cache_salt = layout, token_ids, cache_salt
        self._hashes: list[bytes] = []

    def at(self, end_token: int) -> bytes:
        """Return the name of the block that ends at a token; ValueError if no block ends there."""
        span = self._layout.tokens_per_hash
        number, rest = divmod(end_token, span)
        if rest or not 0 < end_token <= len(self._token_ids):
            raise ValueError(
                f"no block ends at token {end_token} of {len(self._token_ids)}: they have {span}"
            )
        if number > len(self._hashes):
            self._hashes += hash_chain(
                list(self._token_ids[len(self._hashes) * span :]),
                tokens_per_hash=span,
                seed=self._layout.hash_seed,
                cache_salt=self._cache_salt,
                parent=self._hashes[-1] if self._hashes else b"",
            )
        return self._hashes[number - 1]
