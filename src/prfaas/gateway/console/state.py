"""Current state for the console, read from the live parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from prfaas.core.request.events import Outcome
from prfaas.gateway.console.history import History, HistorySample, LinkFlow, LinkSample
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.loops.operator_actions import Control
from prfaas.gateway.routing.part_states import LinkName
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.telemetry.metrics import GatewayMetrics
from prfaas.gateway.telemetry.request_records import RequestRecord, as_json
from prfaas.units import BYTES_PER_TB, NS_PER_MS

RECENT_S = 60.0
REQUESTS_SHOWN = 20
CHANGES_SHOWN = 10
LINKS_SHOWN_MAX = 256
"""Links of a sample. A site of 200 hosts has 40,000, nearly all of them idle."""


@dataclass(frozen=True, slots=True)
class ConsoleReader:
    """Reads the live parts of a gateway."""

    live: LiveParts
    metrics: GatewayMetrics
    control: Control
    """Thresholds, and what operators changed."""
    history: History = field(default_factory=History)
    """Samples of the last hour."""
    alarms: list[Callable[[], list[JsonObject]]] = field(default_factory=list)
    """Read the alarms of the moment, the worst first."""
    flows: dict[LinkName, LinkFlow] = field(default_factory=dict)
    """Bytes delivered by each link, kept from look to look."""

    def sample(self) -> HistorySample:
        """This instant, for the history."""
        totals = self.metrics.totals()
        return HistorySample(round(time.time(), 3), totals, self._links(totals.link_bytes))

    def state(self) -> JsonObject:
        """This moment as the page reads it."""
        now = time.time()
        sample, status = self.sample(), self.control.status()
        return {
            "at": now,
            "model": self.live.deployment.model.name,
            "policy": self.live.deployment.routing.effective_policy.value,
            "loops": status["loops"],
            "clusters": self._clusters(status),
            "members": status["members"],
            "member_sources": status["member_sources"],
            "sample": sample.as_json(),
            "recent": _recent(self.since(now - RECENT_S)),
            "alarms": [found for read in self.alarms for found in read()],
            "changes": [entry.as_json() for entry in self.live.journal.latest(CHANGES_SHOWN)],
            "requests": [as_json(r) for r in self.live.records.latest(REQUESTS_SHOWN)],
        }

    def _clusters(self, status: JsonObject) -> list[JsonObject]:
        engines = {engine["name"]: engine for engine in status["engines"]}
        tables = self.live.deployment.clusters
        return [
            cluster
            | {
                "engines": [
                    engines[name] | {"pool": table.pool}
                    for name, table in tables[cluster["name"]].engines.items()
                ],
                "pools": [self._pool(name) for name in tables[cluster["name"]].pools],
            }
            for cluster in status["clusters"]
        ]

    def _pool(self, name: str) -> JsonObject:
        reported = self.live.pools.subscription(name)
        return {
            "name": name,
            "is_live": reported.is_live,
            "index_state": self.live.driver.index.state(name).value,
            "num_blocks": self.live.driver.index.num_blocks(name),
            "num_leased": reported.num_leased,
            "leased_bytes": reported.leased_bytes,
            "tiers": [
                {"name": tier, **msgspec.structs.asdict(use)}
                for tier, use in reported.tiers.items()
            ],
        }

    def _links(self, moved: Mapping[LinkName, int]) -> dict[str, LinkSample]:
        measured = self.live.pools.telemetry()
        found = {}
        carried = {ends: seen.arrived_bytes for ends, seen in measured.items()}
        for link in self.live.driver.dispatcher.links.busiest(LINKS_SHOWN_MAX, carried):
            ends = link.source, link.destination
            seen = measured.get(ends)
            kv_bytes, price = moved.get(ends, 0), self.live.driver.price_per_tb.get(ends, 0.0)
            flow = self.flows.setdefault(ends, LinkFlow())
            flow.look(time.monotonic(), seen.arrived_bytes if seen else 0)
            found[">".join(ends)] = LinkSample(
                up=self.live.pools.link_up(*ends),
                goodput_bits_per_s=seen.goodput_bits_per_s if seen else 0,
                rtt_ms=round(seen.rtt_ns / NS_PER_MS, 3) if seen else 0.0,
                queued_bytes=seen.queued_bytes if seen else 0,
                in_flight_bytes=seen.in_flight_bytes if seen else 0,
                offload_threshold=link.offload_threshold,
                kv_bytes=kv_bytes,
                cost=kv_bytes * price / BYTES_PER_TB if price else None,
                carried_bits_per_s=round(flow.bits_per_s),
                budget_bits_per_s=seen.budget_bits_per_s if seen else 0,
            )
        return found

    def since(self, at_unix_s: float) -> list[RequestRecord]:
        """Records that began after an instant, the newest first."""
        found = []
        for record in self.live.records.newest_first():
            if record.started_unix_s < at_unix_s:
                break
            found.append(record)
        return found


def is_long(record: RequestRecord) -> bool:
    """Return True if a request has more new tokens than its threshold."""
    decision = record.decision
    return decision is not None and decision.num_new_tokens > decision.offload_threshold


def _recent(records: list[RequestRecord]) -> JsonObject:
    """Statistics of the last minute."""
    ended = [r for r in records if r.outcome is Outcome.FINISHED]
    by_path = {path: [r for r in ended if r.path == path] for path in ("local", "remote")}
    return {
        "window_s": RECENT_S,
        "num_requests": len(records),
        "num_finished": len(ended),
        "num_long": sum(is_long(record) for record in records),
        "paths": {
            path: {"num_requests": len(found), **_percentiles(found)}
            for path, found in by_path.items()
        },
    }


def _percentiles(records: Iterable[RequestRecord]) -> JsonObject:
    times = sorted(r.ttft_ns for r in records if r.ttft_ns is not None)
    if not times:
        return {"ttft_p50_ms": None, "ttft_p90_ms": None}
    return {
        f"ttft_p{percent}_ms": round(times[(len(times) - 1) * percent // 100] / NS_PER_MS, 1)
        for percent in (50, 90)
    }
