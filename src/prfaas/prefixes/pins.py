"""Pins of prompts: pool nodes keep their blocks in memory until the end of the pin.

A pool node forgets a pin after PIN_NS; the gateway repeats it before. So a pool node that was
restarted takes it up again, and pins end when their gateway does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prfaas.core.cache.keep_rules import Effect
from prfaas.errors import PeerError, RequestError
from prfaas.prefixes.copies import unknown_pool
from prfaas.purge.targets import Target
from prfaas.units import NS_PER_S
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.gateway import Order, OrderDone

PIN_NS = 90 * NS_PER_S
"""End of a pin that is not repeated."""
REPEAT_NS = 30 * NS_PER_S
PINS_MAX = 64
"""Pins of a gateway; a pool node keeps no more of one."""


class PinPools(Protocol):
    """The pool nodes of a deployment."""

    def names(self) -> list[str]:
        """Names of all pools."""
        ...

    def send(self, pool: str, message: Message) -> bool:
        """Send a message to a pool; False if it is not connected."""
        ...

    async def order(self, pool: str, order: Order) -> OrderDone:
        """Have a pool pin blocks, or count them; PeerError if it is not connected, does not answer,
        or has left."""
        ...


@dataclass(slots=True)
class _Pin:
    target: Target
    pools: list[str]
    until_ns: int
    repeat_at_ns: int


class Pins:
    """The pins of one gateway.

    Args:
        pools: Where blocks are pinned.
    """

    turns_each_beat = False

    def __init__(self, pools: PinPools) -> None:
        self._pools = pools
        self._pins: dict[bytes, _Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    async def pin(
        self, target: Target, pool: str, for_ns: int, now_ns: int, *, is_dry: bool
    ) -> dict[str, OrderDone]:
        """Pin the blocks of a prompt, or count them; a pin in force gets a new end; RequestError if
        there is no such pool, or there are too many pins.

        Args:
            pool: Name of a pool; empty for all.
            for_ns: How long, ns; 0 ends a pin.

        Returns:
            Answer of each pool.
        """
        pools = self._pools.names()
        if pool and pool not in pools:
            raise unknown_pool(pool, pools)
        pools = [pool] if pool else pools
        order = target.order(Effect.PIN, min(for_ns, PIN_NS), is_dry=is_dry)
        known = self._pins.get(target.hashes)
        if not is_dry and for_ns:
            if known is None and len(self._pins) >= PINS_MAX:
                raise RequestError(
                    f"there are {PINS_MAX} pins, the limit of a gateway; end one with "
                    "`prfaas ctl prefix unpin`",
                    status=409,
                )
            until_ns, repeat_at_ns = now_ns + for_ns, now_ns + REPEAT_NS
            self._pins[target.hashes] = _Pin(target, pools, until_ns, repeat_at_ns)
        elif not is_dry:
            self._pins.pop(target.hashes, None)
        answers = await asyncio.gather(*(self._ask(pool, order) for pool in pools))
        return dict(zip(pools, answers, strict=True))

    def beat(self, now_ns: int) -> None:
        """Repeat the pins that are due; forget those that are over."""
        for hashes, pin in list(self._pins.items()):
            if pin.until_ns <= now_ns:
                del self._pins[hashes]
            elif pin.repeat_at_ns <= now_ns:
                pin.repeat_at_ns = now_ns + REPEAT_NS
                order = pin.target.order(Effect.PIN, min(pin.until_ns - now_ns, PIN_NS))
                for pool in pin.pools:
                    self._pools.send(pool, order)

    def turn(self, now_ns: int) -> None:
        """Nothing is begun by itself."""

    async def _ask(self, pool: str, order: Order) -> OrderDone:
        try:
            return await self._pools.order(pool, order)
        except PeerError as error:
            return OrderDone(job=0, problem=str(error))


def pins_json(
    target: Target, for_s: float, found: Mapping[str, OrderDone], *, is_dry: bool
) -> dict[str, Any]:
    """Return the report of a pin.

    Args:
        for_s: How long, seconds; 0 is the end of a pin.
        found: Answer of each pool.
        is_dry: The blocks were only counted.
    """
    return {
        "request": target.request,
        "tenant": target.tenant,
        "for_s": for_s,
        "dry_run": is_dry,
        "num_blocks": sum(told.num_blocks for told in found.values()),
        "num_bytes": sum(told.num_bytes for told in found.values()),
        "pools": [
            {
                "name": pool,
                "num_blocks": told.num_blocks,
                "num_bytes": told.num_bytes,
                "num_left_out": told.num_left_out,
                "problem": told.problem,
            }
            for pool, told in found.items()
        ],
    }
