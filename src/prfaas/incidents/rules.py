"""Rules of the alarms that a gateway can see, over the last minutes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.gateway.console.history import History, HistorySample, LinkSample
from prfaas.incidents.alarm_kinds import AlarmKind
from prfaas.incidents.alarm_list import ALARMS, BY_NAME
from prfaas.units import format_rate

WINDOW_S = 300.0
NUM_REQUESTS_MIN = 20
"""Minimum number of requests in the window."""
LONG_SHARE = 0.4
OFFLOADED_MIN = 5
FALLBACK_SHARE = 0.1
FAILED_SHARE = 0.01
SLOW_SHARE = 0.5
CORRECTION_MAX = 2.0
"""A plan whose predictions are further off, in either direction, is one of another deployment."""
SLOW_SAMPLES = 3
"""A link is slow after so many busy samples in a row below `SLOW_SHARE` of what it is to carry."""
FROZEN_S = 3600.0
ENDS_SOON_S = 30 * 86400.0
_CERTIFICATE = re.compile(r"certificate|unknown ca\b|hostname mismatch", re.IGNORECASE)
_RANKS = {kind.name: list(type(kind.severity)).index(kind.severity) for kind in ALARMS}


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm of this moment."""

    kind: AlarmKind
    subject: str
    """The part that it is about; empty for the deployment."""
    text: str
    """For people: what, the value, the cause."""

    @property
    def key(self) -> tuple[str, str]:
        """Name and subject; no two alarms of a moment have the same."""
        return self.kind.name, self.subject


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of the rules in addition to the history."""

    missing_engines: Mapping[str, str] = field(default_factory=dict)
    """Reason why they are not ready, by engine."""
    has_pd_engine: bool = True
    """True if an engine of the PD cluster takes requests."""
    silent_pools: Mapping[str, str] = field(default_factory=dict)
    """Reason why their event streams are not connected, by pool."""
    down_links: Sequence[str] = ()
    """Links that are down while both pools answer: "SOURCE>DESTINATION"."""
    open_breakers: Mapping[str, str] = field(default_factory=dict)
    """State of breakers that are not closed, by engine or link."""
    index_states: Mapping[str, str] = field(default_factory=dict)
    """States other than EXACT, by pool."""
    num_long: int = 0
    """Requests of the window that were longer than the threshold."""
    num_decided: int = 0
    """Requests of the window that were decided."""
    num_failed: int = 0
    """Requests of the window that failed."""
    num_ended: int = 0
    """Requests of the window that have ended."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Requests that were refused since refusing began, by reason; empty once it ended."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Factor of predictions, by path."""
    bytes_correction: float = 1.0
    """Factor of the plan's bytes."""
    refuted: Sequence[str] = ()
    """Paths whose predictions are wrong after their correction."""
    mismatches: Mapping[str, str] = field(default_factory=dict)
    """Differences of an engine's KV layout, by engine."""
    refused_members: Mapping[str, str] = field(default_factory=dict)
    """Reason why a listed member is not used, by its name."""
    source_faults: Mapping[str, str] = field(default_factory=dict)
    """Reason why the list of a source of members is old, by source."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Settings that are used from the next start on, by source."""
    detached_engines: Mapping[str, str] = field(default_factory=dict)
    """Pool nodes of engines that are ready and not connected to them, by engine."""
    identity_s: float | None = None
    """Time until the gateway's identity ends; None if unknown."""
    frozen_s: float = 0.0
    """Time for which the loops have been frozen; 0 if they run."""
    why_unwritten: str = ""
    """Reason why the log of incidents cannot be written; empty if it can."""


def alarms(history: History, now_unix_s: float, facts: Facts) -> list[Alarm]:
    """All alarms of this moment; the worst first."""
    window = history.since(now_unix_s - WINDOW_S)
    found = [*_parts(facts), *_links(window, history, facts), *_traffic(window, facts)]
    found += [*_predictions(facts), *_members(facts), *_gateway(facts)]
    return sorted(found, key=lambda alarm: _RANKS[alarm.kind.name])


def _alarm(name: str, subject: str, text: str) -> Alarm:
    return Alarm(BY_NAME[name], subject, text)


def _parts(facts: Facts) -> Iterator[Alarm]:
    if not facts.has_pd_engine:
        yield _alarm("no_engine", "", "no engine of the PD cluster takes requests")
    for name, why in facts.missing_engines.items():
        alarm = "certificate_refused" if _CERTIFICATE.search(why) else "engine_down"
        yield _alarm(alarm, name, f"engine {name} is not ready{_because(why)}")
    for name, why in facts.silent_pools.items():
        alarm = "certificate_refused" if _CERTIFICATE.search(why) else "pool_silent"
        yield _alarm(alarm, name, f"pool node {name} is not connected{_because(why)}")
    for name, state in facts.open_breakers.items():
        text = f"the breaker of {name} is {state}: too many of its requests failed"
        yield _alarm("breaker_open", name, text)
    for name, pool in facts.detached_engines.items():
        text = f"engine {name} is ready and not connected to pool node {pool}"
        yield _alarm("engine_detached", name, text)
    for name, words in facts.mismatches.items():
        text = f"KV blocks of engine {name} cannot be used elsewhere ({words})"
        yield _alarm("layout_mismatch", name, text)
    for name, state in facts.index_states.items():
        if name not in facts.silent_pools:
            text = f"the index of pool {name} is {state}: cached prefixes may be missed"
            yield _alarm("index_incomplete", name, text)


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _members(facts: Facts) -> Iterator[Alarm]:
    for name, why in facts.refused_members.items():
        yield _alarm("member_refused", name, f"{name} is listed and not used: {why}")
    for name, why in facts.source_faults.items():
        text = f"the list of members from {name} is old, the last one stays in use: {why}"
        yield _alarm("membership_old", name, text)
    for name, keys in facts.waiting.items():
        text = (
            f"the deployment file has other settings, used after a restart of the gateway: {keys}"
        )
        yield _alarm("restart_due", name, text)


def _gateway(facts: Facts) -> Iterator[Alarm]:
    if facts.identity_s is not None and facts.identity_s < ENDS_SOON_S:
        days = facts.identity_s / 86400
        text = f"the gateway's certificate or its authority's ends in {days:.1f} days"
        yield _alarm("identity_ends", "", text)
    if facts.frozen_s >= FROZEN_S:
        text = f"the control loops have been frozen for {facts.frozen_s / 3600:.0f} h"
        yield _alarm("loops_frozen", "", text)
    if facts.why_unwritten:
        text = f"the log of incidents cannot be written: {facts.why_unwritten}"
        yield _alarm("incidents_not_written", "", text)


def _predictions(facts: Facts) -> Iterator[Alarm]:
    if not 1 / CORRECTION_MAX <= facts.bytes_correction <= CORRECTION_MAX:
        text = (
            f"prompts have {facts.bytes_correction:.2g} times the KV bytes of the plan, and "
            "predictions are corrected, not the threshold"
        )
        yield _alarm("plan_bytes_off", "", text)
    for path, factor in facts.corrections.items():
        if path in facts.refuted:
            text = (
                f"predictions of the {path} are wrong by more than a factor, corrected or not: "
                "`ttft_max` does not use them"
            )
            yield _alarm("predictions_off", path, text)
        elif not 1 / CORRECTION_MAX <= factor <= CORRECTION_MAX:
            text = (
                f"first tokens of the {path} take {factor:.2g} times the planned time, and "
                "predictions are corrected: the plan's profiles do not match this deployment"
            )
            yield _alarm("plan_does_not_fit", path, text)


def _links(window: Sequence[HistorySample], history: History, facts: Facts) -> Iterator[Alarm]:
    for name in facts.down_links:
        yield _alarm("link_down", name, f"link {name} is down")
    for name, link in window[-1].links.items() if window else ():
        expected = link.budget_bits_per_s or history.best_goodput(name)
        busy = [seen for seen in _seen(window, name) if seen.is_busy][-SLOW_SAMPLES:]
        rates = [seen.goodput_bits_per_s for seen in busy]
        is_slow = len(rates) == SLOW_SAMPLES and max(rates) < SLOW_SHARE * expected
        if is_slow and link.up and link.is_busy:
            text = f"link {name} carries {format_rate(rates[-1])} of {format_rate(round(expected))}"
            yield _alarm("link_slow", name, text)


def _seen(window: Sequence[HistorySample], name: str) -> Iterator[LinkSample]:
    for sample in window:
        link = sample.links.get(name)
        if link is not None:
            yield link


def _traffic(window: Sequence[HistorySample], facts: Facts) -> Iterator[Alarm]:
    if facts.refused:
        reasons = ", ".join(f"{count} {reason}" for reason, count in facts.refused.items())
        yield _alarm("refusals", "", f"requests are refused: {reasons}")
    if facts.num_ended >= NUM_REQUESTS_MIN and facts.num_failed > FAILED_SHARE * facts.num_ended:
        text = f"{facts.num_failed} of the last {facts.num_ended} requests failed"
        yield _alarm("requests_fail", "", text)
    if len(window) < 2:
        return
    first, last = window[0].totals, window[-1].totals
    num_remote = last.num_remote - first.num_remote
    num_fallbacks = last.num_fallbacks - first.num_fallbacks
    kv_bytes = last.kv_bytes - first.kv_bytes
    if facts.num_decided >= NUM_REQUESTS_MIN and not num_remote:
        share = facts.num_long / facts.num_decided
        if share >= LONG_SHARE:
            text = (
                f"nothing is offloaded although {share:.0%} of {facts.num_decided} requests are "
                "longer than the threshold"
            )
            yield _alarm("nothing_offloaded", "", text)
    if num_remote >= OFFLOADED_MIN and not kv_bytes:
        text = f"KV bytes moved: 0, although {num_remote} requests were offloaded"
        yield _alarm("no_kv_bytes", "", text)
    if num_remote >= OFFLOADED_MIN and num_fallbacks > FALLBACK_SHARE * num_remote:
        text = f"{num_fallbacks} of {num_remote} offloaded requests fell back to local prefill"
        yield _alarm("fallbacks", "", text)
