"""Reports of pins, as the API shows them, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prfaas.errors import RequestError
from prfaas.purge.targets import Target
from prfaas.wire.messages.gateway import OrderDone


def unknown_pool(pool: str, known: Sequence[str]) -> RequestError:
    """Return the refusal of an order for a pool that the deployment has not."""
    shown = ", ".join(known)
    return RequestError(f"there is no pool {pool[:80]!r}; known pools: {shown}", status=404)


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
