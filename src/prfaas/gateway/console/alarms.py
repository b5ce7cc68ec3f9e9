"""Alarms for operators: rules over the last minutes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.gateway.console.history import History, HistorySample, LinkSample
from prfaas.units import format_rate

WINDOW_S = 300.0
NUM_REQUESTS_MIN = 20
"""Minimum number of requests in the window."""
LONG_SHARE = 0.4
OFFLOADED_MIN = 5
FALLBACK_SHARE = 0.1
REFUSED_SHARE = 0.05
SLOW_SHARE = 0.5
CORRECTION_MAX = 2.0
"""A plan whose predictions are further off, in either direction, is one of another deployment."""
SLOW_SAMPLES = 3
"""A link is slow after so many busy samples in a row below `SLOW_SHARE` of what it is to carry."""


class Severity(StrEnum):
    """Severity of an alarm."""

    WARNING = "warning"
    """It works, and not as well as it could."""
    CRITICAL = "critical"
    """A part is missing."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm.

    Attributes:
        name: One of a bounded set.
        subject: The part that it is about; empty for the deployment.
        text: For people: what, the value, what to do.
    """

    name: str
    subject: str
    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Inputs of the rules in addition to the history.

    Attributes:
        missing_engines: Engines that are not ready.
        silent_pools: Pool nodes without an event stream.
        index_states: States other than EXACT, by pool.
        num_long: Requests of the window that were longer than the threshold.
        num_decided: Requests of the window that were decided.
        expected_bits_per_s: Planned rate by link; 0 if unknown.
        corrections: Factor of predictions, by path.
        bytes_correction: Factor of the plan's bytes.
        refuted: Paths whose predictions are wrong after their correction.
        mismatches: What differs of an engine's KV layout, by engine.
        refused_members: Why a listed member is not used, by its name.
        source_faults: Why the list of a source of members is old, by source.
        detached_engines: Pool nodes of engines that are ready and not connected to them, by engine.
    """

    missing_engines: Sequence[str]
    silent_pools: Sequence[str]
    index_states: Mapping[str, str]
    num_long: int
    num_decided: int
    expected_bits_per_s: Mapping[str, float]
    corrections: Mapping[str, float] = field(default_factory=dict)
    bytes_correction: float = 1.0
    refuted: Sequence[str] = ()
    mismatches: Mapping[str, str] = field(default_factory=dict)
    refused_members: Mapping[str, str] = field(default_factory=dict)
    source_faults: Mapping[str, str] = field(default_factory=dict)
    detached_engines: Mapping[str, str] = field(default_factory=dict)


def alarms(history: History, latest: HistorySample, facts: Facts) -> list[Alarm]:
    """All alarms of the moment of `latest`, which follows the history; the worst first."""
    window = [*history.since(latest.at_unix_s - WINDOW_S), latest]
    found = [*_parts(facts), *_links(window, history, facts), *_traffic(window, facts)]
    found += [*_predictions(facts), *_members(facts)]
    return sorted(found, key=lambda alarm: alarm.severity is not Severity.CRITICAL)


def _parts(facts: Facts) -> Iterator[Alarm]:
    for name in facts.missing_engines:
        text = f"engine {name} does not answer; requests go elsewhere"
        yield Alarm("engine_down", name, Severity.CRITICAL, text)
    for name in facts.silent_pools:
        text = f"pool node {name} is not connected: its blocks do not count until it is back"
        yield Alarm("pool_silent", name, Severity.CRITICAL, text)
    for name, pool in facts.detached_engines.items():
        text = (
            f"engine {name} is ready and not connected to pool node {pool}: nothing is offloaded "
            "to it or from it; see that it was started with the connector and the socket of this "
            "pool node, and the logs of both"
        )
        yield Alarm("engine_detached", name, Severity.CRITICAL, text)
    for name, words in facts.mismatches.items():
        text = (
            f"KV blocks of engine {name} cannot be used elsewhere ({words}): nothing is offloaded "
            "to it; start both engines with the same model and arguments"
        )
        yield Alarm("layout_mismatch", name, Severity.CRITICAL, text)
    for name, state in facts.index_states.items():
        if name not in facts.silent_pools:
            text = f"the index of pool {name} is {state}: cached prefixes may be missed"
            yield Alarm("index_incomplete", name, Severity.WARNING, text)


def _members(facts: Facts) -> Iterator[Alarm]:
    for name, why in facts.refused_members.items():
        text = f"{name} is listed and not used: {why}"
        yield Alarm("member_refused", name, Severity.WARNING, text)
    for name, why in facts.source_faults.items():
        text = f"the list of members from {name} is old, the last one stays in use: {why}"
        yield Alarm("membership_old", name, Severity.WARNING, text)


def _predictions(facts: Facts) -> Iterator[Alarm]:
    if not 1 / CORRECTION_MAX <= facts.bytes_correction <= CORRECTION_MAX:
        text = (
            f"prompts have {facts.bytes_correction:.2g} times the KV bytes of the plan, and "
            "predictions are corrected, not the threshold: name the model that is served in the "
            "plan and plan again"
        )
        yield Alarm("plan_bytes_off", "", Severity.WARNING, text)
    for path, factor in facts.corrections.items():
        if path in facts.refuted:
            text = (
                f"predictions of the {path} are wrong by more than a factor, corrected or not: "
                "`ttft_max` does not use them; measure with `prfaas profile` and plan again"
            )
            yield Alarm("predictions_off", path, Severity.WARNING, text)
        elif not 1 / CORRECTION_MAX <= factor <= CORRECTION_MAX:
            text = (
                f"first tokens of the {path} take {factor:.2g} times the planned time, and "
                "predictions are corrected: the plan's profiles do not match this deployment"
            )
            yield Alarm("predictions_off", path, Severity.WARNING, text)


def _links(window: Sequence[HistorySample], history: History, facts: Facts) -> Iterator[Alarm]:
    for name, link in window[-1].links.items():
        if not link.up:
            text = f"link {name} is down: nothing is offloaded over it"
            yield Alarm("link_down", name, Severity.CRITICAL, text)
            continue
        expected = facts.expected_bits_per_s.get(name) or history.best_goodput(name)
        busy = [seen for seen in _seen(window, name) if seen.is_busy][-SLOW_SAMPLES:]
        rates = [seen.goodput_bits_per_s for seen in busy]
        if len(rates) == SLOW_SAMPLES and link.is_busy and max(rates) < SLOW_SHARE * expected:
            text = (
                f"link {name} carries {format_rate(rates[-1])} of {format_rate(round(expected))}: "
                "see `prfaas link test`"
            )
            yield Alarm("link_slow", name, Severity.WARNING, text)


def _seen(window: Sequence[HistorySample], name: str) -> Iterator[LinkSample]:
    for sample in window:
        link = sample.links.get(name)
        if link is not None:
            yield link


def _traffic(window: Sequence[HistorySample], facts: Facts) -> Iterator[Alarm]:
    if len(window) < 2:
        return
    first, last = window[0].totals, window[-1].totals
    num_remote = last.num_remote - first.num_remote
    num_refused = last.num_refused - first.num_refused
    num_fallbacks = last.num_fallbacks - first.num_fallbacks
    kv_bytes = last.kv_bytes - first.kv_bytes
    if facts.num_decided >= NUM_REQUESTS_MIN and not num_remote:
        share = facts.num_long / facts.num_decided
        if share >= LONG_SHARE:
            text = (
                f"nothing is offloaded although {share:.0%} of {facts.num_decided} requests are "
                "longer than the threshold: open one under Requests to see why"
            )
            yield Alarm("nothing_offloaded", "", Severity.WARNING, text)
    if num_remote >= OFFLOADED_MIN and not kv_bytes:
        text = f"KV bytes moved: 0, although {num_remote} requests were offloaded"
        yield Alarm("no_kv_bytes", "", Severity.CRITICAL, text)
    if num_remote >= OFFLOADED_MIN and num_fallbacks > FALLBACK_SHARE * num_remote:
        text = f"{num_fallbacks} of {num_remote} offloaded requests fell back to local prefill"
        yield Alarm("fallbacks", "", Severity.WARNING, text)
    num_all = num_remote + last.num_local - first.num_local
    if num_all >= NUM_REQUESTS_MIN and num_refused > REFUSED_SHARE * num_all:
        text = f"{num_refused} requests were refused in {WINDOW_S / 60:.0f} minutes: add capacity"
        yield Alarm("refusals", "", Severity.WARNING, text)
