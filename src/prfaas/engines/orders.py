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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.shipping import Checkpoints, manifest_of
from prfaas.units import NS_PER_MS
from prfaas.wire.frames import TRANSFER_ID_BYTES
from prfaas.wire.messages.engine import Push
from prfaas.wire.messages.fields import Count, Name, TicketBytes

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


def push_of(order: PushOrder, layout: Layout, hashes: Sequence[bytes]) -> Push:
    """The push that an order asks for, with the list of blocks that its ticket names.

    Args:
        order: Of a prefill leg.
        layout: Of the engine's blocks.
        hashes: Hash chain of the prompt. A chain that is too short gives an empty list, which no
            ticket names: the pool node refuses it and reports that to the gateway.
    """
    try:
        blocks = manifest_of(
            replace(layout, checkpoint_tokens=order.checkpoint_tokens),
            hashes,
            have_tokens=order.have_tokens,
            final_tokens=order.final_tokens,
        )
    except ValueError:
        blocks = {}
    return Push(
        transfer_id=bytes.fromhex(order.transfer),
        peer=order.push_to,
        ticket=order.ticket,
        blocks=blocks,
    )


def checkpoints_of(order: PushOrder) -> Checkpoints:
    """The states of a prefill that an order asks for beside the last."""
    return Checkpoints(
        order.checkpoint_tokens, have_tokens=order.have_tokens, final_tokens=order.final_tokens
    )


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
