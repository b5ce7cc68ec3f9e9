"""Orders of gateways on blocks, as tests send them."""

from __future__ import annotations

from typing import Any

from prfaas.core.cache.keep_rules import BAR_NS, Effect
from prfaas.wire.messages.gateway import Order


def purge(job: int = 1, **fields: Any) -> Order:
    """Return a purge of a source, a tenant or a prompt."""
    return Order(job=job, effect=Effect.PURGE, for_ns=BAR_NS, **fields)


def purge_end(job: int = 99, **fields: Any) -> Order:
    """Return the end of a purge."""
    return Order(job=job, effect=Effect.PURGE, **fields)


def word(order: Order) -> str:
    """Return what an order is: its effect, or "end"."""
    return order.effect if order.for_ns else "end"
