"""Explanation of a decision: its inputs, its reason, and the course of the request."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.core.dispatch.route_finder import RouteOption
from prfaas.core.dispatch.scoring import PREFILL_WEIGHTS, Candidate, Weights, scores
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.telemetry.prices import costs_json
from prfaas.gateway.telemetry.request_records import RequestRecord, as_json, decision_json, ms_of


def explain(record: RequestRecord) -> JsonObject:
    """All that is known of a request: the decision, what it saw, and what happened.

    Durations in milliseconds, None where they are not known.
    """
    return {
        "request_id": record.request_id,
        "outcome": record.outcome.value,
        "num_prompt_tokens": record.num_prompt_tokens,
        "quality": record.quality,
        "decision": _decision(record),
        "clusters": [_option(option) for option in record.considered.options if option.cluster.name]
        if record.considered
        else [],
        "costs": costs_json(record.decision.choice if record.decision else None),
        "candidates": _candidates(record),
        "happened": _happened(record),
    }


def _decision(record: RequestRecord) -> JsonObject | None:
    found = record.decision
    if found is None:
        return None
    return decision_json(found) | {
        "refusal": record.refusal.value if record.refusal else None,
        "not_predicted": found.unpredicted.value if found.unpredicted else None,
        "pd_hit_tokens": record.pd_hit_tokens,
        "prfaas_hit_tokens": record.prfaas_hit_tokens,
    }


def _option(option: RouteOption) -> JsonObject:
    """A PrfaaS cluster as the decision saw it."""
    signals, found = option.signals, option.prediction
    link = signals.link
    return {
        "cluster": option.cluster.name,
        "obstacle": option.facts.obstacle.value if option.facts.obstacle else None,
        "link": f"{option.link.source}:{option.link.destination}",
        "pd_hit_tokens": option.facts.pd_hit_tokens,
        "prfaas_hit_tokens": option.facts.prfaas_hit_tokens,
        "predicted_local_ms": ms_of(found.local_ns),
        "predicted_remote_ms": ms_of(found.remote_ns),
        "pull_tokens": found.pull_tokens,
        "local_wait_ms": ms_of(signals.local_wait_ns),
        "remote_wait_ms": ms_of(signals.remote_wait_ns),
        "decode_wait_ms": ms_of(option.prediction.local_decode_ns),
        "link_backlog_bytes": link.backlog_bytes if link else None,
        "link_bits_per_s": link.bits_per_s if link else None,
        "rtt_ms": ms_of(link.rtt_ns if link else 0),
    }


def story(record: RequestRecord) -> JsonObject:
    """The last steps of a request's state machine, oldest first; times since it came in, ms."""
    return {
        "request_id": record.request_id,
        "outcome": record.outcome.value,
        "steps": [
            {"at_ms": ms_of(at_ns), "event": event, "stage": stage, "actions": actions}
            for at_ns, event, stage, actions in record.story
        ],
    }


def _candidates(record: RequestRecord) -> list[JsonObject]:
    """Candidates in the PD cluster and in each PrfaaS cluster."""
    found = record.considered
    if found is None:
        return []
    rated = _rated(found.at_local, found.num_tokens, found.local_weights, "home")
    for option in found.options:
        rated += _rated(option.candidates, found.num_tokens, PREFILL_WEIGHTS, option.cluster.name)
    return rated


def _rated(
    candidates: Sequence[Candidate], num_tokens: int, weights: Weights, where: str
) -> list[JsonObject]:
    rated = []
    for candidate in candidates:
        obstacle, by_name = scores(candidate, num_tokens, weights)
        rated.append(
            {
                "engine": candidate.name,
                "where": where,
                "dropped": obstacle.value if obstacle else None,
                "score": round(sum(by_name.values()), 4),
                "scores": {name: round(score, 4) for name, score in by_name.items()},
                "wait_ms": ms_of(candidate.wait_ns),
                "hit_tokens": candidate.hit_tokens,
                "hint_tokens": candidate.hint_tokens,
                "num_open": candidate.num_open,
            }
        )
    return rated


_HAPPENED = (
    *("prefill_engine", "prefill_ms", "transfer_state", "transfer_ms", "kv_bytes"),
    *("decode_engine", "ttft_ms", "first_token_from", "why_not_early", "second_ms", "e2e_ms"),
    *("relayed_tokens", "why_not_relay", "gap_ms"),
    *("cached_tokens", "pulled_tokens", "num_output_tokens"),
)
"""Values of the record for the list of requests."""


def _happened(record: RequestRecord) -> JsonObject:
    shown, ttft_ns, e2e_ns = as_json(record), record.ttft_ns, record.e2e_ns
    is_timed = ttft_ns is not None and e2e_ns is not None
    return {name: shown[name] for name in _HAPPENED} | {
        "decided_after_ms": ms_of(record.decided_ns),
        "predicted_ttft_ms": ms_of(record.decision.predicted_ns if record.decision else None),
        "decode_ms": ms_of((e2e_ns or 0) - (ttft_ns or 0)) if is_timed else None,
        "fallback": record.fallback.label if record.fallback else None,
    }
