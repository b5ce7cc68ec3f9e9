"""Requests to pools to fetch the beginning of a prompt.

Hot prefixes are fetched for whoever asks next (`loops/replication.py`), others for one request
(`serving/moving_blocks.py`).
Blocks travel as in every pull: the destination's pool node asks the source over the link that the
source keeps to it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.kv.shipping import manifest_of_keys
from prfaas.core.transfer.tickets import Prefix
from prfaas.gateway.pools.ticket_issuer import TicketOffice
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.integrity.copies import Copies
from prfaas.wire.messages.fields import PULL_KEYS_MAX, wire_keys
from prfaas.wire.messages.link import Ahead, Pull


class NotAsked(StrEnum):
    """Reason why no pool was asked to fetch a prefix."""

    POOL_DOWN = "pool_down"
    TOO_MANY_BLOCKS = "too_many_blocks"


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Asks pools to fetch prefixes.

    Attributes:
        tickets: Sign what may move.
        send: Sends a pull to a pool; False if it is not connected.
        copies: Copies whose first use is offered for verification.
    """

    tickets: TicketOffice
    send: Callable[[str, Pull], bool]
    copies: Copies = field(default_factory=Copies)

    def copy(self, transfer: TransferView, prefix: Prefix, have_tokens: int) -> NotAsked | None:
        """Fetch a prefix for whoever asks next, as `fetch` does."""
        refused = self.fetch(transfer, prefix, have_tokens)
        if refused is None:
            self.copies.note(transfer.source, transfer.destination, prefix.hashes)
        return refused

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
