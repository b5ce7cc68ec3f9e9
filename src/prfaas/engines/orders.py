"""What a request says to its engine about blocks that move.

In the request's `kv_transfer_params`:

    prefill leg  {"prfaas": {"transfer": HEX, "push_to": POOL, "have_tokens": N, "final_tokens": M,
                            "ticket": BASE64}}
    decode leg   {"prfaas": {"transfer": HEX, "source": POOL, "wait_ms": N}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

NS_PER_MS = 1_000_000


class PushOrder(msgspec.Struct, frozen=True):
    """What a prefill leg asks for."""

    transfer: str
    push_to: str
    have_tokens: int = 0
    final_tokens: int = 0
    ticket: bytes = b""
    """Base64 in JSON."""


class WaitOrder(msgspec.Struct, frozen=True):
    """What a decode leg asks for."""

    transfer: str
    source: str
    wait_ms: int


Order = PushOrder | WaitOrder


def read_order(parameters: Mapping[str, Any] | None) -> Order | None:
    """The order in a request's `kv_transfer_params`; None without one.

    Raises:
        ValueError: It is malformed.
    """
    order = (parameters or {}).get("prfaas") or {}
    try:
        if "push_to" in order:
            push = msgspec.convert(order, PushOrder)
            bytes.fromhex(push.transfer)
            return push
        if "source" in order:
            wait = msgspec.convert(order, WaitOrder)
            bytes.fromhex(wait.transfer)
            return wait
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(str(error)) from None
    return None
