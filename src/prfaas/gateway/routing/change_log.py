"""Changes by loops and operators with reasons: an entry, a log line and a count for each."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.logs import log_event

ENTRIES_MAX = 1000
Number = int | float | None
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Entry:
    """One change.

    Attributes:
        number: Counts up from 1.
        action: What kind; one of few words.
        what: Which part of the deployment.
        old: Its previous value; None without one.
        new: Its value from here on.
        numbers: What it was decided from, by name with unit.
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

    def as_json(self) -> JsonObject:
        """The entry as `/control/decisions` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


class Journal:
    """The last changes, the oldest forgotten first."""

    def __init__(self, on_entry: Callable[[Entry], None] = lambda _: None) -> None:
        self._on_entry = on_entry
        self._entries: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        self._num_entries = 0

    def note(
        self,
        loop: Loop,
        action: str,
        what: str,
        *,
        why: str,
        old: int | str | None = None,
        new: int | str | None = None,
        numbers: Mapping[str, Number] | None = None,
    ) -> Entry:
        """Remember a change, log and count it; see `Entry`."""
        self._num_entries += 1
        entry = Entry(
            self._num_entries, time.time(), loop, action, what, old, new, why, dict(numbers or {})
        )
        self._entries.append(entry)
        self._on_entry(entry)
        fields = {"loop": loop.value, "action": action, "what": what, "old": old, "new": new}
        log_event(_log, logging.INFO, "control", **fields, why=why, **entry.numbers)
        return entry

    def latest(self, limit: int, after: int = 0) -> list[Entry]:
        """Up to `limit` entries with a number above `after`, the newest first."""
        newest_first = (entry for entry in reversed(self._entries) if entry.number > after)
        return [entry for _, entry in zip(range(limit), newest_first, strict=False)]
