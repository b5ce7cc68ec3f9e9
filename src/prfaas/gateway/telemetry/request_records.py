"""Records of requests: what happened, in numbers and reasons, never prompts or salts; and how they
are shown.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prfaas.core.codec.codecs import Quality
from prfaas.core.dispatch.route_finder import Considered
from prfaas.core.dispatch.types import RefusalReason, RefusedRequest, Routed
from prfaas.core.request.actions import FellBack
from prfaas.core.request.events import Outcome
from prfaas.core.request.facts import RequestEnded, RequestTroubled
from prfaas.core.routing.decision import Decision
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.telemetry.recent_names import RecentNames
from prfaas.units import NS_PER_MS

STEPS_MAX = 64
"""Steps of its state machine that are kept."""
Step = tuple[int, str, str, tuple[str, ...]]
"""Time since the request came in, ns; event; stage that it led to; actions."""
FALLBACKS_MAX = 8
"""Fallbacks of one request that are kept, the last ones."""
_LATE = ("late", "stalled")
"""Reasons of a fallback whose route worked, and another one was sooner: a hedge."""
_DROPPED: Sequence[Step] = []
"""Steps of a record that keeps none any more."""


@dataclass(slots=True)
class RelayRecord:
    """Part of the engine that prefilled in an answer."""

    why_not: str | None = None
    """Reason why it made no token after the first; empty if it was to, None off the remote path."""
    num_tokens: int = 0
    """Those that it made while its blocks were in transit."""


@dataclass(slots=True)
class RequestRecord:
    """Record of one request. Durations in nanoseconds, None while unknown.

    Everything is written by the methods here, which are named after what has happened. A record
    outlives its request: nothing in it refers to a prompt or an answer.
    """

    request_id: str
    api: str
    tenant: str
    stream: bool = False
    service: str = ""
    """Its class of service; empty without."""
    ignored: tuple[str, ...] = ()
    """Fields of its body that have no effect."""
    quality: Quality = Quality.LOSSLESS
    """Quality class of its blocks."""
    started_at_ns: int = field(default_factory=time.monotonic_ns)
    started_unix_s: float = field(default_factory=time.time)
    deadline_ns: int | None = None
    """Instant at which its time is over."""
    num_prompt_tokens: int = 0
    num_sequences: int = 1
    """Prompts times answers to each."""
    num_output_tokens: int = 0
    num_abandoned_tokens: int = 0
    """Tokens of an answer that was cut short, made and seen by nobody: an estimate."""
    output_tokens_max: int = 0
    """Most output tokens that it may have."""
    reserved_tokens: int = 0
    """Output tokens that its tenant was charged before they were made."""
    decode_at_ns: int | None = None
    """Instant at which an engine was asked to decode."""
    output_at_ns: int | None = None
    """Instant of the last output of a stream."""
    is_early: bool = False
    """The engine that prefilled gave the first token."""
    why_not_early: str | None = None
    """Reason why it did not; empty if it was to, None without one."""
    relay: RelayRecord = field(default_factory=RelayRecord)
    gap_ns: int = 0
    """Longest time between two outputs of a stream."""
    second_ns: int | None = None
    """Time to the second output of a stream whose first token came early."""
    cached_tokens: int | None = None
    pd_hit_tokens: int = 0
    prfaas_hit_tokens: int = 0
    decision: Decision | None = None
    considered: Considered | None = None
    """Routes that were compared for it."""
    refusal: RefusalReason | None = None
    rejected: str | None = None
    """Reason of a 429."""
    error: str | None = None
    """The status it was answered with, if it was an error: "503 Service Unavailable"."""
    signed_bytes: int = 0
    """Byte budget of its transfer."""
    pulled_tokens: int | None = None
    """Tokens that a pulled prefix saved; None without a pull."""
    prefill_cluster: str | None = None
    prefill_engine: str | None = None
    """Engine of the last prefill leg."""
    is_prefill_lost: bool = False
    decode_engine: str | None = None
    transfer: TransferView | None = None
    decided_ns: int | None = None
    prefill_ns: int | None = None
    ttft_ns: int | None = None
    e2e_ns: int | None = None
    outcome: Outcome = Outcome.RUNNING
    fallbacks: tuple[tuple[int, FellBack], ...] = ()
    """Reasons for which its route was abandoned or had no effect, each with its age, ns."""
    trace_id: str = ""
    """32 hex digits; empty where nothing records a trace of it."""

    story: Sequence[Step] = ()

    @property
    def path(self) -> str:
        """Label: cluster the prompt was sent to; "none" if it was refused or not decided yet."""
        return self.decision.path.value if self.decision and not self.rejected else "none"

    @property
    def fallback(self) -> FellBack | None:
        """Last reason for which its route was abandoned or had no effect."""
        return self.fallbacks[-1][1] if self.fallbacks else None

    @property
    def ttft_over_predicted(self) -> float | None:
        """TTFT divided by its prediction, if both are of the path that was taken."""
        predicted_ns, begun_ns = self.decision and self.decision.predicted_ns, self.decoding_ns
        if not predicted_ns or begun_ns is None or self.fallback is not None:
            return None
        return begun_ns / predicted_ns

    @property
    def decoding_ns(self) -> int | None:
        """Time until the engine that decodes gave its first token, which predictions are of."""
        if self.relay.num_tokens:
            return None
        return self.second_ns if self.is_early else self.ttft_ns

    @property
    def slot_ns(self) -> int:
        """Time of its sequences in engines that decode; of a stream, from its first output on."""
        if self.decode_at_ns is None or self.e2e_ns is None:
            return 0
        first_ns = self.started_at_ns + (self.decoding_ns or 0)
        ended_ns = self.started_at_ns + self.e2e_ns
        return self.num_sequences * (ended_ns - max(self.decode_at_ns, first_ns))

    def age_ns(self) -> int:
        """Time since the request came in."""
        return time.monotonic_ns() - self.started_at_ns

    # What has happened, in this order

    def limit(self, duration_ns: int) -> None:
        """Its time is over so long after it came in."""
        self.deadline_ns = self.started_at_ns + duration_ns

    def parsed(
        self,
        stream: bool,
        num_sequences: int,
        service: str,
        quality: Quality,
        ignored: tuple[str, ...] = (),
    ) -> None:
        """Its body was read."""
        self.ignored = ignored
        self.stream, self.num_sequences = stream, num_sequences
        self.service, self.quality = service, quality

    def tokenised(self, num_prompt_tokens: int) -> None:
        """Its prompt has this number of tokens, in all sequences."""
        self.num_prompt_tokens = num_prompt_tokens

    def decided(self, found: Routed | RefusedRequest, considered: Considered, detail: str) -> None:
        """A route was chosen for it, or it is refused; `detail` adds to the reason."""
        self.decision, self.considered = found.decision, considered
        self.decided_ns = self.age_ns()
        self.explain(detail)
        if isinstance(found, RefusedRequest):
            self.refusal = found.reason
            return
        self.pd_hit_tokens = found.facts.pd_hit_tokens
        self.prfaas_hit_tokens = found.facts.prfaas_hit_tokens
        self.prefill_cluster = found.cluster

    def explain(self, detail: str) -> None:
        """Add to the reason of the decision what else is known of it."""
        if detail and self.decision is not None:
            self.decision = self.decision._replace(detail=detail)

    def allowed(self, signed_bytes: int) -> None:
        """A transfer of it may move this number of bytes."""
        self.signed_bytes += signed_bytes

    def charged(self, output_tokens_max: int, reserved_tokens: int) -> None:
        """Its tenant was charged for output that is to come."""
        self.output_tokens_max, self.reserved_tokens = output_tokens_max, reserved_tokens

    def prefill_on(self, engine: str) -> None:
        """A prefill leg begins."""
        self.prefill_engine, self.is_prefill_lost = engine, False

    @property
    def prefilled_by(self) -> str | None:
        """Engine that computed the prompt: that of decode without a prefill leg, or if the leg or
        its blocks were lost."""
        return (
            self.decode_engine
            if self.is_prefill_lost
            else self.prefill_engine or self.decode_engine
        )

    def traced(self, trace_id: str) -> None:
        """Spans of it are recorded under this id."""
        self.trace_id = trace_id

    def prefilled(self, duration_ns: int) -> None:
        """The prefill leg has ended, well or not."""
        self.prefill_ns = duration_ns

    def ships_by(self, transfer: TransferView) -> None:
        """Its blocks cross a link."""
        self.transfer = transfer

    def decode_on(self, engine: str, *, is_asked: bool = True) -> None:
        """An engine is chosen to decode it, or to go on, and asked unless its leg begins later."""
        self.decode_engine = engine
        if is_asked and self.decode_at_ns is None:
            self.decode_at_ns = time.monotonic_ns()

    def early(self, why_not: str, *, is_given: bool = False) -> None:
        """The engine that prefills gives the first token, unless `why_not`; or has given it."""
        self.why_not_early, self.is_early = why_not, is_given

    def streamed(self, num_tokens: int) -> None:
        """Output has come; `num_tokens` is as good as it is known before the usage comes."""
        if self.ttft_ns is None:
            self.ttft_ns = self.age_ns()
        elif self.second_ns is None and self.is_early:
            self.second_ns = self.age_ns()
        self.num_output_tokens += num_tokens
        now_ns, before_ns = time.monotonic_ns(), self.output_at_ns
        if before_ns is not None and now_ns - before_ns > self.gap_ns:
            self.gap_ns = now_ns - before_ns
        self.output_at_ns = now_ns

    def streamed_elsewhere(
        self, ttft_ns: int | None, output_at_ns: int | None, gap_ns: int, num_tokens: int
    ) -> None:
        """Another process has streamed so much of it, at these times."""
        self.ttft_ns, self.output_at_ns, self.gap_ns = ttft_ns, output_at_ns, gap_ns
        self.num_output_tokens = num_tokens

    def counted(self, num_prompt_tokens: int, num_output_tokens: int, cached_tokens: int) -> None:
        """The engine has reported the usage."""
        self.num_prompt_tokens, self.cached_tokens = num_prompt_tokens, cached_tokens
        self.num_output_tokens = num_output_tokens

    def fell_back(self, fallback: FellBack) -> None:
        """Its route was left, or did not pay off."""
        fallbacks = *self.fallbacks, (self.age_ns(), fallback)
        self.fallbacks = fallbacks[-FALLBACKS_MAX:]
        num_bytes = self.transfer.num_bytes if self.transfer else 0
        gone = self.transfer is None or self.transfer.is_given_up
        self.is_prefill_lost = (fallback.stage == "prefill" and gone) or (
            fallback.stage == "transfer" and not num_bytes
        )

    def stepped(self, event: object, stage: str, actions: Sequence[object]) -> None:
        """Its state machine has taken a step; kinds are kept, and no content."""
        does = tuple([type(action).__name__ for action in actions])
        step = self.age_ns(), type(event).__name__, stage, does
        if self.story is not _DROPPED:
            self.story = *self.story[1 - STEPS_MAX :], step

    def pulled(self, num_tokens: int) -> None:
        """A pulled prefix saved computing this number of tokens."""
        self.pulled_tokens = num_tokens

    def ended(self, outcome: Outcome) -> None:
        """Its answer is complete, or it is over, but for what is left to send."""
        self.outcome = outcome
        if outcome is Outcome.FINISHED:
            self.e2e_ns = self.age_ns()

    def failed(self, outcome: Outcome, error: str, rejected: str | None) -> None:
        """It is answered with an error: its status, and why it is 429."""
        self.outcome, self.error, self.rejected = outcome, error, rejected

    def abandoned(self, num_tokens: int) -> None:
        """Its answer was cut short; this number of tokens were made in vain."""
        self.num_abandoned_tokens = num_tokens

    def close(self) -> None:
        """Close the record."""
        if self.e2e_ns is None:
            self.e2e_ns = self.age_ns()


def ended(record: RequestRecord) -> RequestEnded:
    """Return the fact that a request has ended."""
    e2e_ns, ttft_ns = record.e2e_ns, record.decoding_ns
    return RequestEnded(
        record.tenant,
        record.service,
        record.outcome is Outcome.FINISHED,
        record.started_at_ns + (e2e_ns or 0),
        record.decode_at_ns,
        None if e2e_ns is None or ttft_ns is None else e2e_ns - ttft_ns,
        record.num_output_tokens,
        record.slot_ns,
    )


def trouble(
    record: RequestRecord, what: str, reason: str, pools: tuple[str, str] = ("", "")
) -> RequestTroubled:
    """Return the fact that a request has left its route, was refused or failed."""
    is_prefill = what in ("prefill", "transfer", "pull") or record.decode_engine is None
    engine = (record.prefill_engine if is_prefill else record.decode_engine) or ""
    started = record.started_unix_s
    return RequestTroubled(record.request_id, record.tenant, started, what, reason, engine, pools)


RECORDS_MAX = 10_000
"""Records that are kept, of about 2 kB each."""
WHOLE_MAX = 1000
"""The newest of them, which have the routes that were compared, and their steps."""
PREFIX_CHARS_MIN = 8


class Records:
    """The last requests, the oldest forgotten first."""

    def __init__(self, records_max: int = RECORDS_MAX, names_bytes_max: int = 0) -> None:
        self.names = RecentNames(names_bytes_max)
        self._records: deque[RequestRecord] = deque(maxlen=records_max)
        self.num_added = 0
        """Number of the newest; they count up from 1."""

    def add(self, record: RequestRecord) -> None:
        """Remember a request from its start."""
        self._records.append(record)
        self.num_added += 1
        if len(self._records) > WHOLE_MAX:
            old = self._records[-WHOLE_MAX - 1]
            old.considered, old.story = None, _DROPPED

    def __len__(self) -> int:
        return len(self._records)

    def newest_first(self) -> Iterator[RequestRecord]:
        """All records."""
        return reversed(self._records)

    def oldest_first(self) -> Iterator[RequestRecord]:
        """All records."""
        return iter(self._records)

    def latest(self, limit: int) -> list[RequestRecord]:
        """Up to `limit` records, the newest first."""
        return list(itertools.islice(self.newest_first(), limit))

    def find(self, request_id: str) -> RequestRecord | None:
        """The newest record of this id, or the only one whose id begins so.

        A beginning has at least `PREFIX_CHARS_MIN` characters.
        """
        found = next((r for r in reversed(self._records) if r.request_id == request_id), None)
        if found is not None or len(request_id) < PREFIX_CHARS_MIN:
            return found
        close = [r for r in self._records if r.request_id.startswith(request_id)]
        return close[0] if len(close) == 1 else None


def log_fields(record: RequestRecord) -> JsonObject:
    """Log line of an ended request, without prompt or answer."""
    transfer = record.transfer
    return {
        "request_id": record.request_id,
        "outcome": record.outcome.value,
        "path": record.path,
        "reason": record.decision.reason.value if record.decision else None,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.num_output_tokens,
        "pulled_tokens": record.pulled_tokens,
        "ttft_ms": ms_of(record.ttft_ns),
        "e2e_ms": ms_of(record.e2e_ns),
        "prefill_engine": record.prefill_engine,
        "prefilled_by": record.prefilled_by,
        "decode_engine": record.decode_engine,
        "transfer": transfer.transfer_id.hex() if transfer else None,
        "fallback": record.fallback.label if record.fallback else None,
    }


def course_of(record: RequestRecord) -> list[str]:
    """Unusual parts of the course of a request, in words of a bounded set."""
    words = ["refused"] if record.refusal or record.rejected else []
    for at_ns, fallback in record.fallbacks:
        if fallback.stage == "decode":
            has_begun = record.ttft_ns is not None and record.ttft_ns <= at_ns
            words.append("continued" if has_begun else "retried")
        else:
            words.append("hedged" if fallback.reason in _LATE else "fell back")
    return list(dict.fromkeys(words))


def first_token_from(record: RequestRecord) -> str | None:
    """Leg whose engine gave the first token; None before it, or without one."""
    if record.is_early:
        return "prefill"
    return "decode" if record.ttft_ns or record.outcome is Outcome.FINISHED else None


_SHOWN = (
    *("request_id", "api", "tenant", "stream", "quality", "error", "path", "trace_id"),
    *("num_prompt_tokens", "num_output_tokens", "cached_tokens", "pulled_tokens"),
    *("pd_hit_tokens", "prfaas_hit_tokens", "why_not_early"),
    *("prefill_cluster", "prefill_engine", "prefilled_by", "decode_engine"),
)
_TIMES = ("decided", "prefill", "ttft", "second", "e2e")


def as_json(record: RequestRecord) -> JsonObject:
    """The record as `/control/requests` shows it."""
    transfer = record.transfer
    shown = {name: getattr(record, name) for name in _SHOWN}
    shown |= {f"{name}_ms": ms_of(getattr(record, f"{name}_ns")) for name in _TIMES}
    return (
        decision_json(record.decision)
        | shown
        | {
            "started_at": record.started_unix_s,
            "outcome": record.outcome.value,
            "refusal": record.refusal.value if record.refusal else record.rejected,
            "transfer_state": transfer.state if transfer else None,
            "kv_bytes": transfer.num_bytes if transfer else 0,
            "transfer_ms": ms_of(transfer.duration_ns or None) if transfer else None,
            "first_token_from": first_token_from(record),
            "relayed_tokens": record.relay.num_tokens,
            "why_not_relay": record.relay.why_not,
            "gap_ms": ms_of(record.gap_ns) if record.gap_ns else None,
            "source_pool": transfer.source if transfer else None,
            "destination_pool": transfer.destination if transfer else None,
            "fallback": {"stage": record.fallback.stage, "reason": record.fallback.reason}
            if record.fallback
            else None,
            "fallbacks": [
                {"at_ms": ms_of(at_ns), "stage": each.stage, "reason": each.reason, "why": each.why}
                for at_ns, each in record.fallbacks
            ],
            "course": course_of(record),
        }
    )


def decision_json(found: Decision | None) -> JsonObject:
    """A decision as every page shows it; all keys are there before there is one."""
    return {
        "path": found.path.value if found else None,
        "reason": found.reason.value if found else None,
        "explanation": found.explanation if found else None,
        "num_new_tokens": found.num_new_tokens if found else None,
        "offload_threshold": found.offload_threshold if found else None,
        "pull_tokens": found.pull_tokens if found else 0,
        "predicted_local_ms": ms_of(found.predicted_local_ns) if found else None,
        "predicted_remote_ms": ms_of(found.predicted_remote_ns) if found else None,
    }


def ms_of(duration_ns: int | None) -> float | None:
    """A duration in milliseconds; None if it is not known."""
    return None if duration_ns is None else round(duration_ns / NS_PER_MS, 3)
