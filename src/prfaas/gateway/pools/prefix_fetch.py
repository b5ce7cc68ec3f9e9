"""The beginning of a prompt as blocks with names, and how a pool is asked to fetch it.

Hot prefixes are fetched for whoever asks next (`loops/replication.py`), others for one request
(`serving/moving_blocks.py`).
Blocks travel as in every pull: the destination's pool node asks the source over the link that the
source keeps to it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import overload

from prfaas.core.codec.quality import Quality
from prfaas.core.kv.blocks import BlockKey, Layout, block_key
from prfaas.core.kv.manifest import manifest_of_keys
from prfaas.core.kv.shipping import is_worth_sending
from prfaas.gateway.pools.ticket_issuer import TicketOffice
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.wire.messages.fields import PULL_KEYS_MAX, wire_keys
from prfaas.wire.messages.link import Ahead, Pull


class NotAsked(StrEnum):
    """Reason why no pool was asked to fetch a prefix."""

    POOL_DOWN = "pool_down"
    TOO_MANY_BLOCKS = "too_many_blocks"


@dataclass(frozen=True)
class Prefix(Sequence[bytes]):
    """The beginning of a prompt: at every boundary the hash that names all before it.

    Attributes:
        layout: Of its blocks.
        hashes: Hash chain, up to where it ends.
        tenant: Name of the tenant of the prefix.
        quality: Class of its blocks.
    """

    layout: Layout
    hashes: Sequence[bytes]
    tenant: str
    quality: Quality = Quality.LOSSLESS

    @property
    def step(self) -> int:
        """Hashes between two boundaries."""
        return self.layout.boundary_tokens // self.layout.tokens_per_hash

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self) * self.layout.boundary_tokens

    def __len__(self) -> int:
        return len(self.hashes) // self.step

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Prefix: ...
    def __getitem__(self, index: int | slice) -> bytes | Prefix:
        if isinstance(index, int):
            if not 0 <= index < len(self):
                raise IndexError(f"boundary {index} of {len(self)}")
            return self.hashes[(index + 1) * self.step - 1]
        end = index.indices(len(self))[1]
        return Prefix(self.layout, self.hashes[: end * self.step], self.tenant, self.quality)

    def keys(self, have_tokens: int) -> Iterator[BlockKey]:
        """Blocks of it that a pool with so much of it can use and lacks."""
        final = self.num_tokens
        for group in self.layout.groups:
            span = group.tokens_per_block
            for end in range(have_tokens + span, final + 1, span):
                if is_worth_sending(group, end, have_tokens=have_tokens, final_tokens=final):
                    yield block_key(self.layout, group, self.hashes, end)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Asks pools to fetch prefixes.

    Attributes:
        tickets: Sign what may move.
        send: Sends a pull to a pool; False if it is not connected.
    """

    tickets: TicketOffice
    send: Callable[[str, Pull], bool]

    def fetch(
        self, transfer: TransferView, prefix: Prefix, have_tokens: int, ahead: Ahead = Ahead.NO
    ) -> NotAsked | None:
        """Have the destination of a transfer fetch the missing blocks of a prefix.

        Args:
            transfer: Between which pools, and its id.
            prefix: Blocks to fetch.
            have_tokens: Usable part of it that the destination holds already.
            ahead: COMPUTING if an engine has yet to store them.

        Returns:
            None if it was asked.
        """
        keys = list(prefix.keys(have_tokens))
        if len(keys) > PULL_KEYS_MAX:
            return NotAsked.TOO_MANY_BLOCKS
        span = {"have_tokens": have_tokens, "final_tokens": prefix.num_tokens}
        blocks = manifest_of_keys(keys)
        ticket = self.tickets.issue(
            transfer, prefix.layout, prefix.tenant, blocks, **span, quality=prefix.quality
        )
        pull = Pull(
            transfer_id=transfer.transfer_id,
            source=transfer.source,
            keys=wire_keys(keys),
            ticket=base64.b64decode(ticket),
            blocks=blocks,
            ahead=ahead,
        )
        return None if self.send(transfer.destination, pull) else NotAsked.POOL_DOWN
