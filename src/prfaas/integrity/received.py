"""Received blocks that can be verified: their prompt, and their names in two versions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prfaas.core.kv.blocks import HASH_BYTES, Layout
from prfaas.core.kv.naming.prompt_names import prompt_hashes
from prfaas.core.kv.shipping import manifest_of, shipped_bytes
from prfaas.core.kv.tenant_salts import SUB_SALT
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.wire.messages.fields import Key
from prfaas.wire.messages.gateway import TransferEnded

PAIRS_MAX = 16_384
"""Blocks of one prompt that are compared."""
_RANDOM = secrets.SystemRandom()


class View(Protocol):
    """Reports of a transfer (`gateway/routing/transfer_tracker.py`)."""

    transfer_id: bytes
    source: str
    destination: str
    is_given_up: bool

    @property
    def arrival(self) -> TransferEnded | None:
        """The destination's report of its end; None while there is none."""


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block in two versions."""

    position: int
    """In the prompt, in entries of its hash chain."""
    is_shipped: bool
    """True if the transfer shipped it; False if the destination had it."""
    names: tuple[Key, Key]
    """As it was received, and as it is computed."""
    is_extra: bool = False
    """True for a state that the transfer may have shipped as a checkpoint: it is compared if both
    versions are kept."""


def drawn(pairs: list[BlockPair]) -> list[BlockPair]:
    """Return all pairs, or PAIRS_MAX that no source can predict."""
    return pairs if len(pairs) <= PAIRS_MAX else _RANDOM.sample(pairs, PAIRS_MAX)


@dataclass(frozen=True, slots=True)
class Received:
    """Blocks that a request has used, or that came for it."""

    pool: str
    sources: frozenset[str]
    """Pools that sent some of them."""
    transfers: Sequence[View]
    """Reports of the transfers of the request; copies have none."""
    engine: str
    """PD engine of the pool."""
    layout: Layout
    """Of the blocks, with the checkpoints that a transfer may have shipped."""
    token_ids: Sequence[int]
    """The prompt. Never logged."""
    hashes: Sequence[bytes]
    """Hash chain of the prompt."""
    cache_salt: str
    """Salt of the chain. Never logged."""
    have_tokens: int
    """Prefix that the pool had."""
    final_tokens: int
    """End of the received prefix."""

    @property
    def is_over(self) -> bool:
        """Return True if the pool has reported the ends of all transfers."""
        return all(view.arrival is not None for view in self.transfers)

    @property
    def is_empty(self) -> bool:
        """Return True if no transfer has brought a byte."""
        ends = [view.arrival for view in self.transfers]
        return bool(ends) and not any(end is None or end.num_bytes for end in ends)

    def stopped_by(self, view: View) -> bool:
        """Return True if a transfer ended without a commit, and not by its request, with all bytes.

        An honest source commits what it has sent.
        """
        end = view.arrival
        if end is None or end.kind is TransferEnd.COMMITTED or view.is_given_up:
            return False
        layout = replace(self.layout, checkpoint_tokens=0)
        span = {"have_tokens": self.have_tokens, "final_tokens": self.final_tokens}
        return end.num_bytes >= shipped_bytes(layout, **span)

    def other_salt(self) -> str:
        """A salt of the same tenant that no request has had: its blocks have to be computed."""
        return f"{self.cache_salt}{SUB_SALT}{secrets.token_hex(16)}"

    def pairs(self, salt: str) -> list[BlockPair]:
        """List the blocks as received and as computed with a salt.

        The prefix that the pool had is among them: what was computed from it depends on it.
        """
        hashes = prompt_hashes(self.layout, self.token_ids, salt)
        place = {name: at for at, name in enumerate(self.hashes)}
        spans = ((0, self.have_tokens), (self.have_tokens, self.final_tokens))
        found: dict[Key, BlockPair] = {}
        # Of the states that may be shipped few are kept anywhere: they are extra.
        for layout in dict.fromkeys((replace(self.layout, checkpoint_tokens=0), self.layout)):
            is_extra = bool(layout.checkpoint_tokens)
            for span in spans:
                is_shipped = span[0] == self.have_tokens
                theirs = iter(_names(layout, hashes, *span))
                for name in _names(layout, self.hashes, *span):
                    pair = BlockPair(place[name[1]], is_shipped, (name, next(theirs)), is_extra)
                    found.setdefault(name, pair)
        return list(found.values())


def _names(layout: Layout, hashes: Sequence[bytes], first: int, last: int) -> list[Key]:
    """Names of the blocks that are worth having between two lengths of a prompt."""
    span = manifest_of(layout, hashes, have_tokens=first, final_tokens=last)
    return [
        (group, names[at : at + HASH_BYTES])
        for group, names in span.items()
        for at in range(0, len(names), HASH_BYTES)
    ]
