"""Watches a gateway for incidents: subscribes to the facts, and looks at the alarms each second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import islice

from prfaas.config.clusters import ClusterRole
from prfaas.core.admission.quotas import Limit
from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.core.facts import FactStream
from prfaas.core.kv.prefix_index import SourceState
from prfaas.core.membership.members import RefusalCause
from prfaas.core.request.events import Outcome
from prfaas.core.request.facts import PartSeen, RequestTroubled, SettingChanged
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.routing.decision import Reason
from prfaas.gateway.console.state import ConsoleReader, is_long
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.incidents.alarm_kinds import Kind, Severity
from prfaas.incidents.book import REFUSED
from prfaas.incidents.log import IncidentLog
from prfaas.incidents.rules import WINDOW_S, Alarm, Facts, alarms

REQUESTS_MAX = 1000
"""Newest requests that the alarms are computed from."""
QUIET_S = 10.0
"""Time without a refusal after which refusing has ended."""
_LIMITS_OF_TENANTS = frozenset(limit.value for limit in Limit)
"""Refusals that are their tenants' own business."""
_SPANS = {
    "freeze": ("frozen", True),
    "unfreeze": ("frozen", False),
    "drain": ("drained", True),
    "resume": ("drained", False),
    "off": ("turned_off", True),
    "on": ("turned_off", False),
    "threshold": ("threshold_set", True),
    "unset": ("threshold_set", False),
}
"""Actions of operators that begin or end a span."""


class Watcher:
    """Finds incidents.

    Args:
        reader: Has the live parts of the gateway, and the history of the console.
        log: Takes the incidents.
        is_leaving: Returns True once the gateway ends: its parts end with it, or it leaves them.
    """

    turns_each_beat = False

    def __init__(
        self, reader: ConsoleReader, log: IncidentLog, is_leaving: Callable[[], bool]
    ) -> None:
        self._reader, self._live, self._log = reader, reader.live, log
        self._is_leaving = is_leaving
        self._seen: dict[str, object] = {}
        """State of parts that was last looked at."""
        self._refused: Counter[str] = Counter()
        self._refused_at = 0.0
        self._frozen_at = 0.0

    def follow(self, facts: FactStream) -> None:
        """Learn of everything from now on."""
        facts.subscribe(PartSeen, self._part_seen)
        facts.subscribe(RequestTroubled, self._troubled)
        facts.subscribe(SettingChanged, self._changed)

    # A loop of the gateway

    def beat(self, _: int) -> None:
        """A second has passed."""
        if self._refused and time.time() - self._refused_at > QUIET_S:
            self._refused.clear()
        self.look()
        self._log.flush()

    def turn(self, now_ns: int) -> None:
        """Begin nothing."""

    # Alarms

    def look(self) -> list[Alarm]:
        """Read the alarms of this moment, and keep the incidents up to date."""
        now = time.time()
        if self._is_leaving():
            return []
        found = alarms(self._reader.history, now, self._facts(now))
        self._log.book.look(found, now)
        return found

    def alarms_json(self) -> list[JsonObject]:
        """The alarms of this moment as the console shows them."""
        book = self._log.book
        found = []
        for alarm in self.look():
            incident = book.of(alarm.key)
            fields = {"name": alarm.kind.name, "subject": alarm.subject, "text": alarm.text}
            fields |= {"severity": alarm.kind.severity.value, "title": alarm.kind.title}
            fields |= {"todo": alarm.kind.todo, "runbook": alarm.kind.runbook}
            since = incident.began_at if incident else book.since(alarm.key)
            found.append({**fields, "since": since, "incident": incident.id if incident else None})
        return found

    def _facts(self, now: float) -> Facts:
        live, dispatcher = self._live, self._live.driver.dispatcher
        names, engines = live.pools.names(), live.engines.by_name.values()
        newest = islice(live.records.newest_first(), REQUESTS_MAX)
        requests = [r for r in newest if r.started_unix_s >= now - WINDOW_S]
        decided = [r for r in requests if r.decision is not None]
        predictions = self._reader.control.predictions()
        states = {name: live.driver.index.state(name) for name in names}
        return Facts(
            missing_engines={
                engine.name: engine.why_down
                for engine in engines
                if not engine.is_ready and not live.members.is_leaving(engine.name)
            },
            has_pd_engine=live.engines.choose(ClusterRole.PD) is not None,
            silent_pools={
                name: live.pools.client(name).why_down
                for name in names
                if not live.pools.is_live(name)
            },
            down_links=[
                f"{link.source}>{link.destination}"
                for link in self._reader.control.links()
                if link.why_down is Reason.LINK_DOWN
                and live.pools.is_live(link.source)
                and live.pools.is_live(link.destination)
            ],
            open_breakers={
                target if isinstance(target, str) else ">".join(target): _state(breaker.state)
                for target in live.engines.guards.unsettled
                if (breaker := live.engines.guards.breakers.get(target)) is not None
            },
            index_states={n: s.value for n, s in states.items() if s is not SourceState.EXACT},
            num_long=sum(map(is_long, decided)),
            num_decided=len(decided),
            num_failed=sum(r.outcome is Outcome.FAILED for r in requests),
            num_ended=sum(r.outcome is not Outcome.RUNNING for r in requests),
            refused=self._refused,
            corrections={_path_of(each): each["correction"] for each in predictions},
            bytes_correction=dispatcher.carried.factor,
            refuted=[_path_of(each) for each in predictions if each["is_refuted"]],
            mismatches={each.engine: each.words for each in live.layouts.mismatches()},
            refused_members={
                name: refusal.words
                for name, refusal in live.members.refusals().items()
                if refusal.reason is not RefusalCause.OTHER_LAYOUT
            },
            source_faults=live.members.faults(),
            waiting=live.members.waiting(),
            detached_engines={
                engine.name: engine.pool
                for engine in engines
                if engine.is_ready and live.pools.lacks(engine.pool, engine.name)
            },
            identity_s=self._identity_s(now),
            frozen_s=now - self._frozen_at if self._frozen_at else 0.0,
            why_unwritten=self._log.why_unwritten,
        )

    def _identity_s(self, now: float) -> float | None:
        [family] = self._reader.metrics.identity_ends.collect()
        ends_at = family.samples[0].value
        return ends_at - now if ends_at else None

    # Facts

    def _part_seen(self, fact: PartSeen) -> None:
        """Look at once if a part has come or gone, for a moment even."""
        engine, pools = self._live.engines.by_name.get(fact.name), self._live.pools
        state: object = None
        if engine is not None:
            state = engine.is_ready
        elif fact.name in pools.names():
            state = pools.is_live(fact.name), pools.subscription(fact.name).view.links
        if self._seen.get(fact.name, state) != state:
            self.look()
            self._log.flush()
        self._seen[fact.name] = state

    def _troubled(self, fact: RequestTroubled) -> None:
        now = time.time()
        if fact.what == REFUSED and fact.reason not in _LIMITS_OF_TENANTS:
            is_first = not self._refused
            self._refused[fact.reason] += 1
            self._refused_at = now
            if is_first:
                self.look()
        elif fact.what == REFUSED:
            return
        self._log.book.trouble(fact, now)

    def _changed(self, fact: SettingChanged) -> None:
        change, book, now = fact.change, self._log.book, fact.change.at_unix_s
        part = _part_of(change.what)
        match change.loop:
            case Loop.OPERATOR:
                self._operated(change, part, fact.operator or "an operator", now)
            case Loop.THRESHOLD:
                words = f"threshold {change.old} to {change.new} tokens: {change.why}"
                book.moved(part, words, now)
            case Loop.MEMBERS:
                words = f"{change.what} {change.action}: {change.why}"
                book.note("member", Kind.MEMBER, part, words, now)
            case Loop.INTEGRITY:
                name = "blocks_altered" if change.action == "bar" else "verification_evaded"
                book.note(name, Kind.POOL, part, change.why, now, Severity.PAGE)
            case Loop.BREAKER:
                self.look()
                words = f"the breaker of {change.what} is {change.action}: {change.why}"
                for name in ("breaker_open", "engine_down", "link_down"):
                    book.step((name, part), words, now)
            case _:
                return
        self._log.flush()

    def _operated(self, change: ChangeEntry, part: str, who: str, now: float) -> None:
        if change.what == "loops":
            self._frozen_at = now if change.action == "freeze" else 0.0
        name, is_begin = _SPANS.get(change.action, (change.action, False))
        words = f"{who}: {change.action} {change.what}, {change.old} to {change.new}"
        book = self._log.book
        if is_begin:
            book.span(name, Kind.OPERATOR, part, words, now)
        elif not book.over(name, part, words, now):
            book.note(name, Kind.OPERATOR, part, words, now)


def _state(state: BreakerState) -> str:
    return state.value.replace("_", " ")


def _part_of(what: str) -> str:
    """Name of the part of a change: "link a:b" is "a>b", "engine e" is "e"."""
    kind, _, name = what.partition(" ")
    return name.replace(":", ">", 1) if kind == "link" else name or what


def _path_of(prediction: JsonObject) -> str:
    return f"{prediction['path']} path of {prediction['cluster']}"
