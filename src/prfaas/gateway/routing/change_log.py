"""Changes by loops and operators with reasons: an entry, a log line and a count for each."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from prfaas.core.control.changes import ChangeEntry, Loop, Number
from prfaas.logs import log_event

ENTRIES_MAX = 1000
_log = logging.getLogger(__name__)


class Journal:
    """The last changes, the oldest forgotten first."""

    def __init__(self, on_entry: Callable[[ChangeEntry], None] = lambda _: None) -> None:
        self._on_entry = on_entry
        self._entries: deque[ChangeEntry] = deque(maxlen=ENTRIES_MAX)
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
    ) -> ChangeEntry:
        """Remember a change, log and count it; see `ChangeEntry`."""
        self._num_entries += 1
        entry = ChangeEntry(
            self._num_entries, time.time(), loop, action, what, old, new, why, dict(numbers or {})
        )
        self._entries.append(entry)
        self._on_entry(entry)
        fields = {"loop": loop.value, "action": action, "what": what, "old": old, "new": new}
        log_event(_log, logging.INFO, "control", **fields, why=why, **entry.numbers)
        return entry

    def priced(self, action: str, why: str) -> None:
        """Remember what became of the price file."""
        self.note(Loop.PRICES, action, "prices", why=why)

    def latest(self, limit: int, after: int = 0) -> list[ChangeEntry]:
        """Up to `limit` entries with a number above `after`, the newest first."""
        newest_first = (entry for entry in reversed(self._entries) if entry.number > after)
        return [entry for _, entry in zip(range(limit), newest_first, strict=False)]
