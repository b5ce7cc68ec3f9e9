"""Changes by loops and operators, and the breakers, whose changes are recorded alike."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.control.changes import ChangeEntry, Loop, Number
from prfaas.core.facts import FactStream
from prfaas.core.request.blocks import told_of_link
from prfaas.core.request.facts import SettingChanged
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import Guards, Target, label_of
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.transfer_tracker import TransferJudged
from prfaas.logs import log_event

ENTRIES_MAX = 1000
acting_operator: ContextVar[str] = ContextVar("operator", default="")
"""Name of the key of the operator whose request is handled; empty elsewhere."""
_log = logging.getLogger(__name__)


class Journal:
    """The last changes, the oldest forgotten first."""

    def __init__(self, facts: FactStream | None = None) -> None:
        self.facts = facts or FactStream()
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
            self._num_entries,
            time.time(),
            loop,
            action,
            what,
            old,
            new,
            why,
            dict(numbers or {}),
            acting_operator.get(),
        )
        self._entries.append(entry)
        self.facts.report(SettingChanged(entry))
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


_WHY = {
    BreakerState.OPEN: "too many of its requests failed",
    BreakerState.HALF_OPEN: "its time is over; one request probes",
    BreakerState.CLOSED: "the probe succeeded",
}


def make_guards(deployment: Deployment, driver: Driver, journal: Journal) -> Guards:
    """Breakers of all engines and links; transfers judge links, and changes are recorded."""
    local = deployment.with_role(ClusterRole.PD)
    remote = deployment.with_role(ClusterRole.PRFAAS)
    engines = [name for cluster in (*local, *remote) for name in cluster.engines]

    def changed(target: Target, before: BreakerState, after: BreakerState) -> None:
        journal.note(
            Loop.BREAKER,
            after.value,
            label_of(target),
            old=before.value,
            new=after.value,
            why=_WHY[after],
        )

    at_local = frozenset(name for cluster in local for name in cluster.engines)
    guards = Guards([*engines, *deployment.links], driver, changed, [at_local])

    def judged(fact: TransferJudged) -> None:
        view = fact.view
        num_missing = event.num_missing if (event := view.best_event) else 0
        outcome = told_of_link(fact.end, num_missing)
        guards.ended((view.source, view.destination), outcome, time.monotonic_ns())

    journal.facts.subscribe(TransferJudged, judged)
    return guards
