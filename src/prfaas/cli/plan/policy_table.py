"""Rows of the table that compares policies, on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prfaas.sim.results.summary import Results


def _seconds(spread: Mapping[str, float], key: str) -> str:
    return f"{spread[key] / 1e3:.2f} s" if key in spread else "-"


def _ttft(results: Results, key: str) -> str:
    return _seconds(results.time_to_first_token, key)


def _queue(results: Results, name: str, scale: float) -> str:
    found = results.queues[name]
    return f"{found['avg'] / scale:.2f} / {found['p99'] / scale:.2f}" if found else "-"


def _sent(results: Results, purpose: str) -> float:
    """GB for a purpose, over all links."""
    return sum(link["bytes"][purpose] for link in results.traffic.values()) / 1e9


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in found.items()) or "-"


_SHOWN_OF_TTFT = (
    ("mean", "avg"),
    ("P50", "p50"),
    ("P90", "p90"),
    ("P99", "p99"),
    ("longest", "max"),
)
ROWS: tuple[tuple[str, Callable[[Results], str]], ...] = (
    ("requests", lambda r: f"{r.num_requests:,}"),
    ("finished", lambda r: f"{r.outcomes.get('finished', 0):,}"),
    ("rejected", lambda r: f"{r.outcomes.get('rejected', 0):,}"),
    ("failed", lambda r: f"{r.outcomes.get('failed', 0):,}"),
    ("goodput", lambda r: f"{r.goodput:.3f} req/s"),
    ("SLO attainment", lambda r: f"{r.slo_attainment:.1%}"),
    *((f"TTFT {name}", partial(_ttft, key=key)) for name, key in _SHOWN_OF_TTFT),
    ("TPOT mean", lambda r: f"{r.inter_token_latency.get('avg', 0):.1f} ms"),
    ("TPOT P99", lambda r: f"{r.inter_token_latency.get('p99', 0):.1f} ms"),
    ("E2E P90", lambda r: _seconds(r.request_latency, "p90")),
    ("offloaded", lambda r: f"{r.offloaded_ratio:.1%}"),
    ("prefix hits", lambda r: f"{r.prefix_hit_ratio:.1%}"),
    ("egress mean", lambda r: f"{r.egress['avg_bits_per_s'] / 1e9:.2f} Gbit/s"),
    ("egress P99 of 1 s", lambda r: f"{r.egress['p99_bits_per_s'] / 1e9:.2f} Gbit/s"),
    ("PD-P busy", lambda r: f"{r.utilisation['pd_prefill']:.1%}"),
    ("PrfaaS busy", lambda r: f"{r.utilisation['prfaas_prefill']:.1%}"),
    ("link busy", lambda r: f"{r.utilisation['link']:.1%}"),
    ("decode slots", lambda r: f"{r.utilisation['decode_slots']:.1%}"),
    ("PD-P queue mean / P99, s", lambda r: _queue(r, "pd_prefill_ms", 1e3)),
    ("PrfaaS queue mean / P99, s", lambda r: _queue(r, "prfaas_prefill_ms", 1e3)),
    ("link backlog mean / P99, GB", lambda r: _queue(r, "link_bytes", 1e9)),
    ("decode queue mean / P99", lambda r: _queue(r, "decode_requests", 1)),
    ("pulled, copied, GB", lambda r: f"{_sent(r, 'pull'):.1f}, {_sent(r, 'copy'):.1f}"),
    ("recomputed", lambda r: f"{r.num_recomputed:,}"),
    ("routes left, by reason", lambda r: _counts(r.fallbacks)),
    ("retries", lambda r: _counts(r.retries)),
    ("breakers opened", lambda r: _counts(r.breakers_opened)),
    ("cost of traffic", lambda r: f"{r.price['traffic']:.2f}"),
    ("cost of prefills by use", lambda r: f"{r.price['prefills']:.2f}"),
    ("cost of a request in time", lambda r: f"{r.price['per_request_in_time']:.5f}"),
    ("cost of a million prompt tokens", lambda r: f"{r.price['per_million_prompt_tokens']:.3f}"),
)
