"""Recent requests: their records, and how they are shown."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from prfaas.core.routing.decision import Decision
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.telemetry.recent_names import RecentNames
from prfaas.gateway.telemetry.request_record import RequestRecord
from prfaas.units import NS_PER_MS

RECORDS_MAX = 1000
PREFIX_CHARS_MIN = 8


class Records:
    """The last requests, the oldest forgotten first."""

    def __init__(self, records_max: int = RECORDS_MAX, names_bytes_max: int = 0) -> None:
        self.names = RecentNames(names_bytes_max)
        self._records: deque[RequestRecord] = deque(maxlen=records_max)

    def add(self, record: RequestRecord) -> None:
        """Remember a request from its start."""
        self._records.append(record)

    def newest_first(self) -> Iterator[RequestRecord]:
        """All records."""
        return reversed(self._records)

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


def as_json(record: RequestRecord) -> JsonObject:
    """The record as `/control/requests` shows it."""
    transfer = record.transfer
    return decision_json(record.decision) | {
        "request_id": record.request_id,
        "api": record.api,
        "tenant": record.tenant,
        "stream": record.stream,
        "quality": record.quality,
        "started_at": record.started_unix_s,
        "outcome": record.outcome.value,
        "path": record.path,
        "refusal": record.refusal.value if record.refusal else record.rejected,
        "error": record.error,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "cached_tokens": record.cached_tokens,
        "pd_hit_tokens": record.pd_hit_tokens,
        "prfaas_hit_tokens": record.prfaas_hit_tokens,
        "pulled_tokens": record.pulled_tokens,
        "transfer_state": transfer.state if transfer else None,
        "kv_bytes": transfer.num_bytes if transfer else 0,
        "transfer_ms": ms_of(transfer.duration_ns or None) if transfer else None,
        "decided_ms": ms_of(record.decided_ns),
        "prefill_ms": ms_of(record.prefill_ns),
        "ttft_ms": ms_of(record.ttft_ns),
        "e2e_ms": ms_of(record.e2e_ns),
        "prefill_cluster": record.prefill_cluster,
        "prefill_engine": record.prefill_engine,
        "prefilled_by": record.prefilled_by,
        "decode_engine": record.decode_engine,
        "source_pool": transfer.source if transfer else None,
        "destination_pool": transfer.destination if transfer else None,
        "fallback": {"stage": record.fallback.stage, "reason": record.fallback.reason}
        if record.fallback
        else None,
    }


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
