"""A transfer that can be verified: its prompt, its blocks, and their names in two versions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prfaas.core.kv.blocks import HASH_BYTES, Layout
from prfaas.core.kv.manifest import manifest_of
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.core.kv.tenant_tag import SUB_SALT
from prfaas.wire.messages.comparing import PAIRS_MAX
from prfaas.wire.messages.fields import Key

_RANDOM = secrets.SystemRandom()


class View(Protocol):
    """Reports of a transfer (`gateway/routing/transfer_tracker.py`)."""

    source: str
    destination: str

    @property
    def state(self) -> str:
        """State by the reports of its pools."""


@dataclass(frozen=True, slots=True)
class Received:
    """A transfer that has been used by a request.

    Attributes:
        transfer: Reports of it.
        engine: PD engine of the destination.
        layout: Of its blocks.
        token_ids: The prompt. Never logged.
        hashes: Hash chain of the prompt.
        cache_salt: Salt of the chain. Never logged.
        have_tokens: Prefix that the destination had.
        final_tokens: End of the shipped prefix.
    """

    transfer: View
    engine: str
    layout: Layout
    token_ids: Sequence[int]
    hashes: Sequence[bytes]
    cache_salt: str
    have_tokens: int
    final_tokens: int

    def other_salt(self) -> str:
        """A salt of the same tenant that no request has had: its blocks have to be computed."""
        return f"{self.cache_salt}{SUB_SALT}{secrets.token_hex(16)}"

    def pairs(self, salt: str) -> list[tuple[Key, Key]]:
        """Names of the blocks as received and as computed with a salt: PAIRS_MAX at most, drawn."""
        computed = prompt_hashes(self.layout, self.token_ids, salt)
        pairs = list(zip(self._keys(self.hashes), self._keys(computed), strict=True))
        # The source must not know which of them are not compared.
        return pairs if len(pairs) <= PAIRS_MAX else _RANDOM.sample(pairs, PAIRS_MAX)

    def _keys(self, hashes: Sequence[bytes]) -> list[Key]:
        blocks = manifest_of(
            self.layout, hashes, have_tokens=self.have_tokens, final_tokens=self.final_tokens
        )
        return [
            (group, names[at : at + HASH_BYTES])
            for group, names in blocks.items()
            for at in range(0, len(names), HASH_BYTES)
        ]
