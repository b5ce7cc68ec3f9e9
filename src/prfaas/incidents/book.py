"""The incidents of a gateway in memory: which are open, whom they touch, when they end.

Without I/O and clock: time comes in as an argument.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from prfaas.core.request.facts import RequestTroubled
from prfaas.incidents.alarm_kinds import Kind, Severity
from prfaas.incidents.alarm_list import BY_NAME
from prfaas.incidents.incident import COUNTED_MAX, WORDS_MAX, Incident
from prfaas.incidents.rules import Alarm

Key = tuple[str, str]

RECENT_MAX = 1000
"""Incidents in memory; one that is open counts, and is not forgotten."""
BEFORE_S = 7.0
"""Age of the first sign of an incident: a part that hangs is noticed this late."""
AGAIN_S = 3.0
"""A part that fails again so soon has the same incident."""
MOVES_S = 120.0
"""Moves of a threshold that follow so soon are one incident."""
LATE_S = 300.0
"""Time after its end in which an incident learns of requests that it touched."""
SIGNS_MAX = 1000
HELD_S = {
    "link_down": 2.0,
    "engine_detached": 5.0,
    "index_incomplete": 5.0,
    "link_slow": 5.0,
    "predictions_off": 60.0,
    "plan_does_not_fit": 60.0,
}
"""Time for which an alarm has to stay, else it is no incident: parts that come back need it."""
REFUSED = "refused"
_PARTLESS = {
    "refusals": REFUSED,
    "no_engine": REFUSED,
    "requests_fail": "failed",
    "fallbacks": "fallback",
}


class IncidentBook:
    """Open and recent incidents.

    Args:
        began_at: Start of the gateway, Unix seconds.
        grace_s: Time after it in which no alarm begins an incident: parts are being connected.
    """

    def __init__(self, began_at: float, grace_s: float) -> None:
        self._began_at = began_at
        self.ready_at = began_at + grace_s
        """Instant from which alarms begin incidents."""
        self._open: dict[Key, Incident] = {}
        self._carried: dict[Key, Incident] = {}
        """Open ones of an earlier process, of which nothing is known yet."""
        self._since: dict[Key, float] = {}
        """First instant of each alarm of this moment."""
        self.recent: OrderedDict[str, Incident] = OrderedDict()
        """By id, the oldest first."""
        self.unwritten: dict[str, Incident] = {}
        """Those that have changed, by id."""
        self.num_lost = 0
        """Incidents that were forgotten before they were written."""
        self._counted: dict[str, set[str]] = {}
        self._by_part: dict[str, list[Incident]] = {}
        self._signs: deque[tuple[float, RequestTroubled]] = deque(maxlen=SIGNS_MAX)
        """Recent requests in trouble that no incident of a part explains."""

    # Alarms

    def look(self, found: Sequence[Alarm], now: float) -> None:
        """Open and close incidents by the alarms of this moment."""
        keys = {alarm.key: alarm for alarm in found}
        self._since = {key: self._since.get(key, now) for key in keys}
        if now < self.ready_at:
            return
        for key, alarm in keys.items():
            if key in self._open:
                continue
            if now - self._since[key] >= HELD_S.get(alarm.kind.name, 0.0):
                self._begin(alarm, self._since[key])
        for key, incident in [*self._open.items()]:
            if key not in keys and incident.name in BY_NAME:
                self._end(incident, now, self._how(incident, found))
        for incident in [*self._carried.values()]:
            self._unwatched(incident)

    def since(self, key: Key) -> float | None:
        """First instant of an alarm of this moment."""
        return self._since.get(key)

    def of(self, key: Key) -> Incident | None:
        """The open incident of an alarm or a change."""
        return self._open.get(key)

    def _begin(self, alarm: Alarm, at: float) -> None:
        kind = alarm.kind
        incident = self._carried.pop(alarm.key, None)
        if incident is not None:
            incident.step(self._began_at, f"it goes on: {alarm.text}")
        elif (incident := self._again(alarm.key, at)) is not None:
            incident.ended_at, incident.how_ended = None, ""
            incident.step(at, f"again: {alarm.text}")
        else:
            signs = self._early(kind.name, alarm.subject, at)
            at = min([at, *(sign_at for sign_at, _ in signs)])
            incident = self._add(kind.name, kind.kind, alarm.subject, kind.severity, alarm.text, at)
            for sign in signs:
                self._touch(incident, sign[1], sign[0])
                if incident.subject:
                    self._signs.remove(sign)
        self._follow(incident)

    def _again(self, key: Key, at: float) -> Incident | None:
        """The incident of a part that fails again."""
        for incident in reversed(self.recent.values()):
            if incident.key == key and incident.ended_at is not None:
                if at - incident.ended_at > AGAIN_S:
                    return None
                incident.num_times += 1
                return incident
        return None

    @staticmethod
    def _how(incident: Incident, found: Sequence[Alarm]) -> str:
        """End of an incident whose part has another alarm now."""
        others = (a.kind.title for a in found if incident.subject and a.subject == incident.subject)
        return next((f"it goes on as {title!r}" for title in others), "")

    # Changes

    def note(
        self,
        name: str,
        kind: Kind,
        subject: str,
        cause: str,
        now: float,
        severity: Severity = Severity.NOTE,
    ) -> Incident:
        """Something happened at one instant."""
        incident = self._add(name, kind, subject, severity, cause, now)
        incident.ended_at = now
        return incident

    def span(self, name: str, kind: Kind, subject: str, cause: str, now: float) -> None:
        """Something begins that lasts until `over`."""
        if (name, subject) in self._open:
            self._open[name, subject].step(now, cause)
            self.changed(self._open[name, subject])
            return
        self._follow(self._add(name, kind, subject, Severity.NOTE, cause, now))

    def over(self, name: str, subject: str, why: str, now: float) -> bool:
        """End an incident that `span` began; False if there is none."""
        incident = self._open.get((name, subject))
        if incident is not None:
            self._end(incident, now, why)
        return incident is not None

    def moved(self, subject: str, words: str, now: float) -> None:
        """A loop has moved a threshold: moves that follow each other are one incident."""
        for incident in reversed(self.recent.values()):
            if (incident.name, incident.subject) == ("threshold", subject):
                if now - (incident.ended_at or now) > MOVES_S:
                    break
                incident.step(now, words)
                incident.ended_at, incident.num_times = now, incident.num_times + 1
                self.changed(incident)
                return
        self.note("threshold", Kind.THRESHOLD, subject, words, now).step(now, words)

    def step(self, key: Key, text: str, now: float) -> None:
        """Add to the time line of an open incident."""
        if (incident := self._open.get(key)) is not None:
            incident.step(now, text)
            self.changed(incident)

    # Requests

    def trouble(self, fact: RequestTroubled, now: float) -> None:
        """A request has left its route, was refused or failed."""
        is_known = False
        for part in parts_of(fact):
            for incident in reversed(self._by_part.get(part, ())):
                ended = now if incident.ended_at is None else incident.ended_at
                if ended < now - LATE_S:
                    break
                if incident.severity is not Severity.NOTE and fact.started_unix_s <= ended:
                    self._touch(incident, fact, now)
                    is_known |= bool(incident.subject)
        if not is_known:
            self._signs.append((now, fact))

    def _touch(self, incident: Incident, fact: RequestTroubled, at: float) -> None:
        counted = self._counted.setdefault(incident.id, set())
        is_new = fact.request_id not in counted
        if is_new and len(counted) < COUNTED_MAX:
            counted.add(fact.request_id)
        incident.touch(at, fact.request_id, fact.tenant, fact.what, fact.reason, is_new)
        self.changed(incident)

    def _early(self, name: str, subject: str, at: float) -> list[tuple[float, RequestTroubled]]:
        """Requests that met an incident before it was noticed."""
        part = _PARTLESS.get(name, subject)
        return [
            (sign_at, fact)
            for sign_at, fact in self._signs
            if sign_at >= at - BEFORE_S and part in parts_of(fact)
        ]

    # An earlier process

    def carry(self, incidents: Iterable[Incident], stopped_at: float, now: float) -> None:
        """Take over what an earlier process left open; alarms decide whether it goes on.

        Args:
            stopped_at: Last instant at which that process is known to have run.
        """
        for incident in incidents:
            self._remember(incident)
            unseen_s = max(0.0, now - stopped_at)
            incident.step(now, f"the gateway runs again: nobody watched for {unseen_s:.1f} s")
            if incident.name in BY_NAME:
                self._carried[incident.key] = incident
                self.changed(incident)
            else:
                self._end(incident, now, "a restart of the gateway discards it")

    def _unwatched(self, incident: Incident) -> None:
        del self._carried[incident.key]
        how = "it was over when the gateway ran again; nobody watched its end"
        self._end(incident, self._began_at, how)

    # Steps

    def _add(
        self, name: str, kind: Kind, subject: str, severity: Severity, cause: str, at: float
    ) -> Incident:
        incident = Incident(
            secrets.token_hex(4), name, kind, subject, severity, at, cause[:WORDS_MAX]
        )
        self._remember(incident)
        self.changed(incident)
        return incident

    def _remember(self, incident: Incident) -> None:
        self.recent[incident.id] = incident
        self._by_part.setdefault(_PARTLESS.get(incident.name, incident.subject), []).append(
            incident
        )
        while len(self.recent) > RECENT_MAX:
            ended = (each for each in self.recent.values() if each.ended_at is not None)
            if (oldest := next(ended, None)) is None:
                return
            self._forget(oldest)

    def _forget(self, incident: Incident) -> None:
        del self.recent[incident.id]
        self._counted.pop(incident.id, None)
        self.num_lost += self.unwritten.pop(incident.id, None) is not None
        part = _PARTLESS.get(incident.name, incident.subject)
        left = [each for each in self._by_part[part] if each is not incident]
        if left:
            self._by_part[part] = left
        else:
            del self._by_part[part]

    def _follow(self, incident: Incident) -> None:
        self._open[incident.key] = incident
        self.changed(incident)

    def _end(self, incident: Incident, at: float, how: str) -> None:
        self._open.pop(incident.key, None)
        incident.ended_at, incident.how_ended = max(at, incident.began_at), how
        incident.step(at, how or "it is over")
        self.changed(incident)

    def changed(self, incident: Incident) -> None:
        """It has to be written again."""
        self.unwritten[incident.id] = incident


def parts_of(fact: RequestTroubled) -> list[str]:
    """Names under which incidents are found that a request may have met."""
    if fact.what in (REFUSED, "failed"):
        parts = [fact.what, fact.engine]
    else:
        source, destination = fact.pools
        is_moved = source != destination
        parts = [fact.engine, source, destination, f"{source}>{destination}" if is_moved else ""]
        parts.append("fallback" if fact.what != "decode" else "")
    return [part for part in parts if part]
