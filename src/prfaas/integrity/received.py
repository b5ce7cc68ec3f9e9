"""A transfer that can be verified: its prompt, its blocks, and their names in two versions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.core.kv.blocks import HASH_BYTES, Layout
from prfaas.core.kv.manifest import manifest_of
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.core.kv.tenant_salts import SUB_SALT
from prfaas.wire.messages.fields import Key

PAIRS_MAX = 16_384
"""Blocks of one prompt that are compared."""
_RANDOM = secrets.SystemRandom()


class View(Protocol):
    """Reports of a transfer (`gateway/routing/transfer_tracker.py`)."""

    source: str
    destination: str

    @property
    def state(self) -> str:
        """State by the reports of its pools."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A block in two versions.

    Attributes:
        position: In the prompt, in entries of its hash chain.
        is_shipped: True if the transfer shipped it; False if the destination had it.
        names: As it was received, and as it is computed.
    """

    position: int
    is_shipped: bool
    names: tuple[Key, Key]


def drawn(pairs: list[Pair]) -> list[Pair]:
    """Return all pairs, or PAIRS_MAX that no source can predict."""
    return pairs if len(pairs) <= PAIRS_MAX else _RANDOM.sample(pairs, PAIRS_MAX)


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

    def pairs(self, salt: str) -> list[Pair]:
        """List the blocks as received and as computed with a salt.

        The prefix that the destination had is among them: what was computed from it depends on it.
        """
        names = self._names(self.hashes)
        computed = self._names(prompt_hashes(self.layout, self.token_ids, salt))
        place = {name: at for at, name in enumerate(self.hashes)}
        return [
            Pair(place[ours[1]], is_shipped, (ours, theirs))
            for (ours, is_shipped), (theirs, _) in zip(names, computed, strict=True)
        ]

    def _names(self, hashes: Sequence[bytes]) -> list[tuple[Key, bool]]:
        """Names of the prefix's blocks, and of those that were shipped.

        Checkpoints are not among them: few of those that may be shipped are kept anywhere, and a
        comparison that misses blocks is not complete.
        """
        layout = replace(self.layout, checkpoint_tokens=0)
        return [
            ((group, names[at : at + HASH_BYTES]), first == self.have_tokens)
            for first, last in ((0, self.have_tokens), (self.have_tokens, self.final_tokens))
            for group, names in manifest_of(
                layout, hashes, have_tokens=first, final_tokens=last
            ).items()
            for at in range(0, len(names), HASH_BYTES)
        ]
