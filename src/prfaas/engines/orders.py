"""Instructions of a request to its engine about transfers of blocks.

In the request's `kv_transfer_params`:

    prefill leg  {"prfaas": {"transfer": HEX, "push_to": POOL, "have_tokens": N, "final_tokens": M,
                            "checkpoint_tokens": S, "ticket": BASE64,
                            "wait": {as a decode leg}}}
    decode leg   {"prfaas": {"transfer": HEX, "source": POOL, "wait_ms": N}}

Both wait for blocks in transit: a decode leg for those of its hand-off or of a pulled prefix, a
prefill leg at home for the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Annotated, Any

import msgspec

from prfaas.core.kv.blocks import HASH_BYTES, Layout
from prfaas.core.kv.shipping import Checkpoints, is_worth_sending, manifest_of
from prfaas.units import NS_PER_MS
from prfaas.wire.frames import TRANSFER_ID_BYTES
from prfaas.wire.messages.engine import Push
from prfaas.wire.messages.fields import Count, Key, Name, TicketBytes

TransferHex = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-fA-F]{{{2 * TRANSFER_ID_BYTES}}}$")]


class WaitOrder(msgspec.Struct, frozen=True):
    """Wait for blocks that are in transit."""

    transfer: TransferHex
    source: Name
    wait_ms: Count

    @property
    def transfer_id(self) -> bytes:
        """Name of the transfer that the blocks come with."""
        return bytes.fromhex(self.transfer)

    @property
    def wait_ns(self) -> int:
        """Time limit of the wait."""
        return self.wait_ms * NS_PER_MS


class PushOrder(msgspec.Struct, frozen=True):
    """Instructions of a prefill leg."""

    transfer: TransferHex
    push_to: Name
    have_tokens: Count = 0
    final_tokens: Count = 0
    ticket: TicketBytes = b""
    """Base64 in JSON."""
    wait: WaitOrder | None = None
    """A prefix that is pulled for it."""
    checkpoint_tokens: Count = 0
    """Least distance of intermediate states to ship; 0 is none."""


Order = PushOrder | WaitOrder


class OrderedPush:
    """Push that a prefill leg's order asks for: its announcement, and the blocks that it takes.

    Args:
        order: Of a prefill leg.
        layout: Of the engine's blocks.
    """

    def __init__(self, order: PushOrder, layout: Layout) -> None:
        self.transfer_id = bytes.fromhex(order.transfer)
        self.final_tokens = order.final_tokens
        """Length of the prompt at which the other side will resume."""
        self._order, self._layout = order, layout
        self._groups = {group.index: group for group in layout.groups}
        self._checkpoints = Checkpoints(
            order.checkpoint_tokens, have_tokens=order.have_tokens, final_tokens=order.final_tokens
        )
        self._taken: set[Key] = set()
        self._lacking: set[Key] = set()
        """Blocks that are announced and not taken; checkpoints are none of them."""

    def announcement(self, hashes: Sequence[bytes]) -> Push:
        """Return the first message to the pool node, with the list of blocks that its ticket names.

        Args:
            hashes: Hash chain of the prompt. A chain that is too short gives an empty list, which
                no ticket names: the pool node refuses it and reports that to the gateway.
        """
        order, layout = self._order, self._layout
        span = {"have_tokens": order.have_tokens, "final_tokens": order.final_tokens}
        with_states = replace(layout, checkpoint_tokens=order.checkpoint_tokens)
        try:
            blocks = manifest_of(with_states, hashes, **span)
            self._lacking = {
                (group, names[at : at + HASH_BYTES])
                for group, names in manifest_of(layout, hashes, **span).items()
                for at in range(0, len(names), HASH_BYTES)
            }
        except ValueError:
            blocks = {}
        return Push(
            transfer_id=self.transfer_id, peer=order.push_to, ticket=order.ticket, blocks=blocks
        )

    def take(self, stored: Iterable[tuple[Key, int]]) -> set[Key]:
        """Return the stored blocks that the other side can use; they count as sent.

        Args:
            stored: Blocks, and where each ends in the prompt, tokens; 0 is not in the prompt.
        """
        taken = {
            key
            for key, end_token in sorted(stored, key=itemgetter(1))
            if self._is_wanted(key, end_token)
            or self._checkpoints.takes(self._groups[key[0]], end_token)
        }
        self._taken |= taken
        self._lacking -= taken
        return taken

    @property
    def is_complete(self) -> bool:
        """Return True if the other side gets all blocks that it can use: the request may go on."""
        return bool(self._taken) and not self._lacking

    def rest(self, ends: Iterable[tuple[Key, int]]) -> list[Key]:
        """Return the blocks of the prompt that the other side can use and that were not stored.

        Args:
            ends: All blocks of the prompt, and where each ends, tokens.
        """
        wanted = {key for key, end_token in ends if self._is_wanted(key, end_token)}
        return sorted(wanted - self._taken)

    def _is_wanted(self, key: Key, end_token: int) -> bool:
        have, final = self._order.have_tokens, self._order.final_tokens
        group = self._groups[key[0]]
        return is_worth_sending(group, end_token, have_tokens=have, final_tokens=final)


def wait_in(order: Order | None) -> WaitOrder | None:
    """Transfer that a leg waits for; None without one."""
    return order.wait if isinstance(order, PushOrder) else order


def read_order(parameters: Mapping[str, Any] | None) -> Order | None:
    """The order in a request's `kv_transfer_params`; None without one; ValueError if it is
    malformed."""
    order = (parameters or {}).get("prfaas") or {}
    try:
        if "push_to" in order:
            return msgspec.convert(order, PushOrder)
        if "source" in order:
            return msgspec.convert(order, WaitOrder)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(str(error)) from None
    return None
