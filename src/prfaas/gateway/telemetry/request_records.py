"""What happened to recent requests: numbers and reasons, never prompts or salts."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from prfaas.core.dispatch.route_options import Considered
from prfaas.core.dispatch.types import Refusal
from prfaas.core.request.events import Outcome
from prfaas.core.routing.decision import Decision
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.routing.transfer_tracker import TransferView

RECORDS_MAX = 1000
PREFIX_CHARS_MIN = 8
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why the remote path or a pull was left, or did not pay off.

    Attributes:
        stage: "prefill", "transfer" or "decode" of the remote path, or "pull".
        reason: One of a bounded set; labels a metric.
    """

    stage: str
    reason: str


@dataclass(slots=True)
class Record:
    """One request. Durations in nanoseconds, None while unknown."""

    request_id: str
    api: str
    tenant: str
    stream: bool = False
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
    cached_tokens: int | None = None
    pd_hit_tokens: int = 0
    prfaas_hit_tokens: int = 0
    decision: Decision | None = None
    considered: Considered | None = None
    """Routes that were compared for it."""
    refusal: Refusal | None = None
    rejected: str | None = None
    """Why it was answered with 429."""
    error: str | None = None
    """The status it was answered with, if it was an error: "503 Service Unavailable"."""
    signed_bytes: int = 0
    """What its transfer was allowed to move."""
    pulled_tokens: int | None = None
    """What a pulled prefix saved computing; None without a pull."""
    prefill_cluster: str | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None
    transfer: TransferView | None = None
    decided_ns: int | None = None
    prefill_ns: int | None = None
    ttft_ns: int | None = None
    e2e_ns: int | None = None
    outcome: Outcome = Outcome.RUNNING
    fallback: Fallback | None = None

    @property
    def path(self) -> str:
        """Label: cluster the prompt was sent to; "none" if it was refused or not decided yet."""
        return self.decision.path.value if self.decision and not self.rejected else "none"

    @property
    def ttft_over_predicted(self) -> float | None:
        """Time to first token by its prediction, where both are of the path that was taken."""
        predicted_ns = self.decision.predicted_ns if self.decision else None
        if not predicted_ns or self.ttft_ns is None or self.fallback is not None:
            return None
        return self.ttft_ns / predicted_ns

    def age_ns(self) -> int:
        """Time since the request came in."""
        return time.monotonic_ns() - self.started_at_ns

    def as_log(self) -> JsonObject:
        """What the log says of a request that has ended; nothing of what was asked or answered."""
        transfer = self.transfer
        return {
            "request_id": self.request_id,
            "outcome": self.outcome.value,
            "path": self.path,
            "reason": self.decision.reason.value if self.decision else None,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.num_output_tokens,
            "pulled_tokens": self.pulled_tokens,
            "ttft_ms": _ms(self.ttft_ns),
            "e2e_ms": _ms(self.e2e_ns),
            "prefill_engine": self.prefill_engine,
            "decode_engine": self.decode_engine,
            "transfer": transfer.transfer_id.hex() if transfer else None,
            "fallback": f"{self.fallback.stage}/{self.fallback.reason}" if self.fallback else None,
        }

    def as_json(self) -> JsonObject:
        """The record as `/control/requests` shows it."""
        decision, transfer = self.decision, self.transfer
        return {
            "request_id": self.request_id,
            "api": self.api,
            "tenant": self.tenant,
            "stream": self.stream,
            "started_at": self.started_unix_s,
            "outcome": self.outcome.value,
            "path": self.path,
            "reason": decision.reason.value if decision else None,
            "explanation": decision.explanation if decision else None,
            "refusal": self.refusal.value if self.refusal else self.rejected,
            "error": self.error,
            "offload_threshold": decision.offload_threshold if decision else None,
            "predicted_local_ms": _ms(decision.predicted_local_ns) if decision else None,
            "predicted_remote_ms": _ms(decision.predicted_remote_ns) if decision else None,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": decision.num_new_tokens if decision else None,
            "num_output_tokens": self.num_output_tokens,
            "cached_tokens": self.cached_tokens,
            "pd_hit_tokens": self.pd_hit_tokens,
            "prfaas_hit_tokens": self.prfaas_hit_tokens,
            "pull_tokens": decision.pull_tokens if decision else 0,
            "pulled_tokens": self.pulled_tokens,
            "transfer_state": transfer.state if transfer else None,
            "kv_bytes": transfer.num_bytes if transfer else 0,
            "transfer_ms": _ms(transfer.duration_ns or None) if transfer else None,
            "decided_ms": _ms(self.decided_ns),
            "prefill_ms": _ms(self.prefill_ns),
            "ttft_ms": _ms(self.ttft_ns),
            "e2e_ms": _ms(self.e2e_ns),
            "prefill_cluster": self.prefill_cluster,
            "prefill_engine": self.prefill_engine,
            "decode_engine": self.decode_engine,
            "source_pool": transfer.source if transfer else None,
            "destination_pool": transfer.destination if transfer else None,
            "fallback": {"stage": self.fallback.stage, "reason": self.fallback.reason}
            if self.fallback
            else None,
        }


class Records:
    """The last requests, the oldest forgotten first."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records: deque[Record] = deque(maxlen=records_max)

    def add(self, record: Record) -> None:
        """Remember a request from its start."""
        self._records.append(record)

    def newest_first(self) -> Iterator[Record]:
        """All records."""
        return reversed(self._records)

    def latest(self, limit: int) -> list[Record]:
        """Up to `limit` records, the newest first."""
        return list(itertools.islice(self.newest_first(), limit))

    def find(self, request_id: str) -> Record | None:
        """The newest record of this id, or the only one whose id begins so.

        A beginning has at least `PREFIX_CHARS_MIN` characters.
        """
        found = next((r for r in reversed(self._records) if r.request_id == request_id), None)
        if found is not None or len(request_id) < PREFIX_CHARS_MIN:
            return found
        close = [r for r in self._records if r.request_id.startswith(request_id)]
        return close[0] if len(close) == 1 else None


def _ms(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else round(duration_ns / NS_PER_MS, 3)
