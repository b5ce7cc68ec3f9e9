"""One round of a drill: the requests under way while something is lost, and their effects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from .clients import Call, Clients
from .site import Site

WHOLE_S = 60.0
"""Time limit for parts to come back, and for requests to end."""
Records = dict[str, dict[str, object]]
"""Records of the gateways, by request id."""


@dataclass
class Round:
    """Effects of one loss.

    Attributes:
        calls: Requests that were under way at any time of the round.
        moved: Requests that left their path, or whose stream went on elsewhere.
        wait_s: Longest wait for a first token.
    """

    calls: list[Call] = field(default_factory=list)
    moved: int = 0
    wait_s: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Errors and wrong answers."""
        return [call.problem for call in self.calls if call.problem]

    @property
    def num_wrong(self) -> int:
        """Wrong answers."""
        return sum(call.is_wrong for call in self.calls)

    def judge(self, call: Call, record: dict[str, object]) -> bool:
        """Add a request; return True if it left its path."""
        is_moved = record.get("fallback") is not None
        self.moved += is_moved
        self.wait_s = max(self.wait_s, call.wait_s)
        return is_moved


def calls_from_now(clients: Clients) -> Callable[[], list[Call]]:
    """Return a function that lists the requests under way now and those sent since."""
    first = len(clients.calls)
    under_way = [call for call in clients.calls if not call.ended_at_s]
    return lambda: under_way + clients.calls[first:]


async def ended(site: Site, calls: list[Call]) -> Records:
    """Wait for the ends of requests; return the records of all."""
    async with asyncio.timeout(WHOLE_S):
        while not all(call.ended_at_s for call in calls):  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.1)
    return await site.records()


async def until_whole(site: Site) -> None:
    """Wait until every gateway sees every part."""
    async with asyncio.timeout(WHOLE_S):
        while not await site.is_whole():  # noqa: ASYNC110 - processes signal nothing
            await asyncio.sleep(0.1)
