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
    """One change."""

    number: int
    """Counts up from 1."""
    at_unix_s: float
    loop: Loop
    action: str
    """Its kind; one of few words."""
    what: str
    """Part of the deployment."""
    old: int | str | None
    """Its previous value; None without one."""
    new: int | str | None
    """Its value from here on."""
    why: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """What it was decided from, by name with unit."""
    operator: str = ""
    """Name of the operator's key; empty for a loop."""

    def as_json(self) -> dict[str, object]:
        """The entry as `/control/decisions` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}
