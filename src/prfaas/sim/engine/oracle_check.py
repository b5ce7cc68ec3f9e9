"""Check that a decision uses only reports that a gateway could have received by then.

`LeastDelays` records how late the dispatcher is informed; every run is checked. That the
dispatcher holds no reference into the simulation is tested (`tests/sim/test_checks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class News(StrEnum):
    """Kinds of reports to a gateway."""

    REPORT = "report of an instance or a link"
    LINK_DEAD = "silence of a link"
    LINK_ALIVE = "recovery of a link"


@dataclass(slots=True)
class LeastDelays:
    """The least time that passed between something and its telling, by kind, ns."""

    least_ns: dict[News, int] = field(default_factory=dict)

    def note(self, news: News, happened_at_ns: int, told_at_ns: int) -> None:
        """Something that happened, or began, at an instant is told at another."""
        late_ns = told_at_ns - happened_at_ns
        known = self.least_ns.get(news)
        if known is None or late_ns < known:
            self.least_ns[news] = late_ns


def too_early(heard: LeastDelays, needed_ns: dict[News, int]) -> list[str]:
    """One line for each kind of news that was told before it could be known.

    Args:
        needed_ns: How long each kind takes, ns.
    """
    return [
        f"the gateway heard of a {news} after {late_ns} ns; that takes {needed_ns[news]} ns"
        for news, late_ns in heard.least_ns.items()
        if late_ns < needed_ns[news]
    ]
