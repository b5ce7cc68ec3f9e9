"""The ports of membership: sources of members, and the connections that follow them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from prfaas.core.membership.members import Listed, Member, RefusedEntry

OnList = Callable[[Sequence[Listed], Sequence[RefusedEntry]], None]
"""Called with the whole list of a source, and the entries of it that cannot be read."""


class Source(Protocol):
    """A source of members."""

    name: str
    """Label of metrics, one of few."""
    fault: str
    """Reason why the last list is old; "" if it is current."""
    waits: str
    """Keys of what has changed beside it and is used from the next start on; "" for none."""
    current_at_s: float
    """Last time at which the list was known to be current, on the clock of the loop."""

    async def follow(self, on_list: OnList) -> None:
        """Call `on_list` with each new list until cancelled; a fault keeps the last one."""


class MemberConnections(Protocol):
    """Connections to members."""

    def join(self, member: Member) -> bool:
        """Connect to a member; False if it is connected already."""

    def withhold(self, name: str, *, withheld: bool) -> None:
        """Give a member nothing new, or lift that."""

    def leave(self, member: Member) -> None:
        """Disconnect from a member, and forget what it holds."""

    def is_idle(self, member: Member) -> bool:
        """Return True if no leg and no transfer uses a member."""

    def note(self, action: str, what: str, why: str) -> None:
        """Record a change for operators."""
