"""Blocks of a request that a push includes: the same as with vLLM's tier."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.kv.blocks import BlockKey, CacheGroup, Layout, block_key
from prfaas.core.kv.shipping import is_worth_sending
from prfaas.engines.orders import PushOrder, checkpoints_of, push_of
from prfaas.wire.messages.engine import Push
from prfaas.wire.messages.fields import Key


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to store: its name, its end in the prompt, and its sources."""

    key: BlockKey
    end_token: int
    stain: bytes


class PushOfRequest:
    """The push that a prefill leg asks for.

    Args:
        layout: Of the blocks.
    """

    def __init__(self, layout: Layout, order: PushOrder) -> None:
        self._layout, self._order = layout, order
        self._groups = {group.index: group for group in layout.groups}
        self.transfer_id = bytes.fromhex(order.transfer)
        self.sent: set[Key] = set()
        self._checkpoints = checkpoints_of(order)

    def announced(self, hashes: list[bytes]) -> Push:
        """First message to the pool node."""
        return push_of(self._order, self._layout, hashes)

    def takes(self, block: NewBlock) -> bool:
        """Return True if the other side can use a block; it counts as sent then."""
        group = self._groups[block.key.group]
        worth = self._is_worth(group, block.end_token)
        if worth or self._checkpoints.takes(group, block.end_token):
            self.sent.add(block.key)
            return True
        return False

    def wanted(self, hashes: list[bytes]) -> set[Key]:
        """All that the other side can use of a prompt."""
        span = self._layout.tokens_per_hash
        return {
            block_key(self._layout, group, hashes, end)
            for group in self._layout.groups
            for end in range(span, len(hashes) * span + 1, span)
            if self._is_worth(group, end)
        }

    def _is_worth(self, group: CacheGroup, end_token: int) -> bool:
        have, final = self._order.have_tokens, self._order.final_tokens
        return is_worth_sending(group, end_token, have_tokens=have, final_tokens=final)
