"""Orders of operators on the blocks of one recent prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prfaas.core.control.changes import ChangeEntry, Number
from prfaas.errors import RequestError
from prfaas.prefixes.copies import CopyOffer, CopyOffers
from prfaas.prefixes.pins import Pins
from prfaas.prefixes.reports import pins_json
from prfaas.purge.recent_names import RecentNames
from prfaas.units import NS_PER_S


class Steering:
    """Pins and copies of recent prompts.

    Args:
        names: Names of recent prompts.
        tag_of: Returns the tag of a tenant.
        offers: Finds copies and their cost.
        move: Makes a copy; returns why it was not made, or nothing.
        note: Records an order, by action, target and figures.
    """

    def __init__(
        self,
        names: RecentNames,
        tag_of: Callable[[str], str],
        pins: Pins,
        offers: CopyOffers,
        move: Callable[[CopyOffer], Awaitable[str]],
        note: Callable[[str, str, Mapping[str, Number]], ChangeEntry],
        clock_ns: Callable[[], int],
    ) -> None:
        self._names, self._tag_of, self.pins = names, tag_of, pins
        self._offers, self._move, self._note = offers, move, note
        self._clock_ns = clock_ns

    async def pin(self, request: str, pool: str, for_s: float, *, is_dry: bool) -> dict[str, Any]:
        """Pin the blocks of a prompt for a time, or count them.

        Args:
            request: Id of a recent request.
            pool: Name of a pool; empty for all.
            for_s: How long, seconds; 0 ends a pin.

        Raises:
            RequestError: There is no such request or pool, or there are too many pins.
        """
        target = self._names.target(request, self._tag_of)
        for_ns, now_ns = round(for_s * NS_PER_S), self._clock_ns()
        found = await self.pins.pin(target, pool, for_ns, now_ns, is_dry=is_dry)
        report = pins_json(target, for_s, found, is_dry=is_dry)
        numbers = {"blocks": report["num_blocks"], "bytes": report["num_bytes"], "for_s": for_s}
        action = "pin" if for_s else "unpin"
        return report | self._noted(action, target.request, numbers, is_dry=is_dry)

    async def copy(self, request: str, pool: str, source: str, *, is_dry: bool) -> dict[str, Any]:
        """Copy the blocks of a prompt to a pool, or show what that costs.

        Args:
            request: Id of a recent request.
            source: Pool to copy from; empty for the one that has the most of it.
            is_dry: Only show the cost.

        Raises:
            RequestError: There is no such request or pool, no link, or nothing to copy.
        """
        if not pool:
            raise RequestError("give the pool that the prompt is copied to")
        recent = self._names.find(request)
        offer = self._offers.find(recent, pool, source)
        problem = "" if is_dry else await self._move(offer)
        shown = {"request": recent.request, "dry_run": is_dry, "problem": problem}
        numbers = {"bytes": offer.num_bytes, "not_done": int(bool(problem))}
        noted = self._noted("copy", recent.request, numbers, is_dry=is_dry)
        return shown | offer.as_json() | noted

    def _noted(
        self, action: str, request: str, numbers: Mapping[str, Number], *, is_dry: bool
    ) -> dict[str, Any]:
        if is_dry:
            return {"decision": None}
        return {"decision": self._note(action, f"prompt of request {request}", numbers).as_json()}
