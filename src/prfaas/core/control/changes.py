"""A change of a setting by a control loop or an operator: what, from which value to which, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Number = int | float | None


class Loop(StrEnum):
    """Author of a change; labels a metric."""

    THRESHOLD = "threshold"
    """The short-term loop."""
    ROLES = "roles"
    """The long-term loop."""
    REPLICATION = "replication"
    ADMISSION = "admission"
    BREAKER = "breaker"
    OPERATOR = "operator"
    MEMBERS = "members"
    PRICES = "prices"
    """The price file."""
    INTEGRITY = "integrity"
    """Verification of received blocks."""


@dataclass(frozen=True, slots=True)
class ChangeEntry:
    """One change.

    Attributes:
        number: Counts up from 1.
        action: What kind; one of few words.
        what: Which part of the deployment.
        old: Its previous value; None without one.
        new: Its value from here on.
        numbers: What it was decided from, by name with unit.
        operator: Name of the operator's key; empty for a loop.
    """

    number: int
    at_unix_s: float
    loop: Loop
    action: str
    what: str
    old: int | str | None
    new: int | str | None
    why: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    operator: str = ""

    def as_json(self) -> dict[str, object]:
        """The entry as `/control/decisions` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}
