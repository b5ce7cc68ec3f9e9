"""No oracle read: a decision knows only what a gateway could have heard by then.

Two things make that so, and both are checked after every run. The dispatcher holds no reference
into the simulation: what it knows was told to it. And what is told about the world outside the
gateway is told late: `Heard` notes how late.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from prfaas.core.routing.cost_tables import Costs


class News(StrEnum):
    """What a gateway hears of."""

    REPORT = "report of an instance or a link"
    LINK_DEAD = "silence of a link"
    LINK_ALIVE = "recovery of a link"


@dataclass(slots=True)
class Heard:
    """The least time that passed between something and its telling, by kind, ns."""

    least_ns: dict[News, int] = field(default_factory=dict)

    def note(self, news: News, happened_at_ns: int, told_at_ns: int) -> None:
        """Something that happened, or began, at an instant is told at another."""
        late_ns = told_at_ns - happened_at_ns
        known = self.least_ns.get(news)
        if known is None or late_ns < known:
            self.least_ns[news] = late_ns


def too_early(heard: Heard, needed_ns: dict[News, int]) -> list[str]:
    """One line for each kind of news that was told before it could be known.

    Args:
        heard: What was noted.
        needed_ns: How long each kind takes, ns.
    """
    return [
        f"the gateway heard of a {news} after {late_ns} ns; that takes {needed_ns[news]} ns"
        for news, late_ns in heard.least_ns.items()
        if late_ns < needed_ns[news]
    ]


def reads_of_the_simulation(dispatcher: object) -> list[str]:
    """One line if there are objects of `prfaas.sim` that the dispatcher could look into.

    Costs one visit of everything the dispatcher holds.
    """
    found = {
        type(held).__qualname__
        for held in _held_by(dispatcher)
        if type(held).__module__.startswith("prfaas.sim.")
    }
    return [f"the dispatcher can look into {', '.join(sorted(found))}"] if found else []


def _held_by(root: object) -> Iterator[Any]:
    """Everything that can be reached, except over modules, classes and global names."""
    seen, queue = {id(root)}, [root]
    while queue:
        held = queue.pop()
        yield held
        if isinstance(held, FunctionType):
            inside: list[Any] = list(held.__closure__ or ())
        else:
            inside = gc.get_referents(held)
        for other in inside:
            if id(other) not in seen and gc.is_tracked(other) and not isinstance(other, _ENDS):
                seen.add(id(other))
                queue.append(other)


_ENDS = (type, ModuleType, BuiltinFunctionType, Costs)
"""Also tables of costs: numbers, and many of them."""
