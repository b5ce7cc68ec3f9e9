"""Facts: what has happened is reported once, and annexes subscribe to it.

A fact is a frozen value whose type names what has happened (`TicketSigned`). The code of the house
reports it; metrics, audit, bill, market and verification subscribe when the process is set up.
Beside it there is one question: may a change be made now? A log that must not lose it says no.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

F = TypeVar("F")

Subscriber = Callable[[Any], None]


class FactStream:
    """The facts of one process, by their types.

    Subscribers of a type are called in the order in which they came, at once, in the caller's
    thread. They must not raise and must not wait.
    """

    def __init__(self) -> None:
        self._subscribers: defaultdict[type, list[Subscriber]] = defaultdict(list)
        self._guards: defaultdict[type, list[Subscriber]] = defaultdict(list)
        self._keepers: list[Callable[[], Awaitable[bool]]] = []

    def subscribe(self, kind: type[F], subscriber: Callable[[F], None]) -> None:
        """Call `subscriber` with every fact of this type from now on."""
        self._subscribers[kind].append(subscriber)

    def wants(self, kind: type) -> bool:
        """Return True if a fact of this type has a subscriber: others need not be made."""
        return kind in self._subscribers

    def report(self, fact: object) -> None:
        """Tell all subscribers of the type of this fact."""
        for subscriber in self._subscribers.get(type(fact), ()):
            subscriber(fact)

    def guard(self, kind: type[F], guard: Callable[[F], None]) -> None:
        """Ask `guard` before every change of this type; it raises to refuse one."""
        self._guards[kind].append(guard)

    def may(self, change: object) -> None:
        """Ask whether a change may be made now.

        Raises:
            Exception: What the first guard raised that refuses it; nothing may be changed.
        """
        for guard in self._guards.get(type(change), ()):
            guard(change)

    def keep(self, keeper: Callable[[], Awaitable[bool]]) -> None:
        """Wait for `keeper` where a fact has to be on disk; it returns False if that fails."""
        self._keepers.append(keeper)

    async def kept(self) -> bool:
        """Wait until logs have all reported facts on disk; False if one cannot write them now."""
        return all([await keeper() for keeper in self._keepers])
