"""Prometheus metrics of the gateway. Every label is bounded by the deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from prometheus_client import generate_latest

from prfaas.core.dispatch.types import RefusalReason
from prfaas.core.facts import FactStream
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.core.request.events import OTHER, REASONS, Outcome, label
from prfaas.core.request.facts import RequestRefused, SettingChanged
from prfaas.core.resilience.circuit_breaker import BreakerState
from prfaas.core.resilience.quarantine import Guards, label_of
from prfaas.core.routing.decision import Path, Reason
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.connections import ClientsCounted, Closed
from prfaas.gateway.pools.layout_check import LayoutCheck
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.transfer_tracker import TransferArrived, TransferView
from prfaas.gateway.telemetry.control_metrics import (
    ControlMetrics,
    EventMetrics,
    TenantMetrics,
    show_state,
)
from prfaas.gateway.telemetry.prices import MarketMetrics
from prfaas.gateway.telemetry.request_records import RequestRecord, first_token_from
from prfaas.membership.views import MemberMetrics, PartRegistry
from prfaas.series import Families, at_zero
from prfaas.units import NS_PER_S
from prfaas.wire.renewal import identity_gauge

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0)
_WAN_SECONDS = (0.001, 0.0025, *_SECONDS, 120.0, 300.0, 600.0)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_GAP = (0.05, 0.1, 0.5, 1, 2.5, 10)
_LATENCY = (*_SECONDS, 120.0, 300.0, 600.0)
_REMOTE_REASONS = {
    Reason.ABOVE_THRESHOLD,
    Reason.ALWAYS_REMOTE,
    Reason.FASTER_REMOTE,
    Reason.CHEAPEST_REMOTE,
}
_CLIENTS_FAULT = "prefill", "refused"
"""Stage and reason of a request whose fields decode refuses."""


@dataclass(slots=True)
class Totals:
    """Counts since the start of the gateway."""

    num_in_flight: int = 0
    num_remote: int = 0
    """Requests that were offloaded and have ended."""
    num_local: int = 0
    """Requests that stayed in the PD cluster and have ended."""
    num_refused: int = 0
    num_fallbacks: int = 0
    """Offloaded requests that fell back, except those whose fields decode refuses: that is their
    clients' fault."""
    link_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    """KV cache that arrived, by source and destination."""

    @property
    def kv_bytes(self) -> int:
        """KV cache that arrived over any link."""
        return sum(self.link_bytes.values())


class GatewayMetrics:
    """All metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry, self._totals = PartRegistry(), Totals()
        make = Families(self.registry)
        self.members = MemberMetrics(self.registry)
        self.parts_changed = True
        """True if parts have come or gone since the metrics were last read."""
        self.on_read: Callable[[], None] = lambda: None
        """Called before the metrics are read."""
        self.tenants = TenantMetrics(make)
        self.control = ControlMetrics(make)
        self.events = EventMetrics(make)
        self.market = MarketMetrics(make)
        self.identity_ends = identity_gauge("gateway", self.registry)
        self._requests = make.counter("requests", "Requests by outcome", "path", "outcome")
        at_zero(self._requests, (*Path, "none"), Outcome)
        self._decisions = make.counter("route_decisions", "Routing decisions", "path", "reason")
        at_zero(self._decisions, (Path.REMOTE,), _REMOTE_REASONS)
        at_zero(self._decisions, (Path.LOCAL,), set(Reason) - _REMOTE_REASONS)
        self._fallbacks = make.counter(
            "fallback",
            "Offloaded requests that fell back to local compute; stage decode: requests that "
            "another engine continued",
            "stage",
            "reason",
        )
        for stage, reasons in REASONS.items():
            at_zero(self._fallbacks, (stage,), (*reasons, OTHER))
        self._kv_bytes = make.counter(
            "kv_bytes", "Bytes of KV cache that arrived", "source", "destination"
        )
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens", "path")
        self._cached_tokens = make.counter(
            "cached_tokens", "Prompt tokens that were cached before the request", "path"
        )
        self._transfer = make.histogram(
            "kv_transfer_seconds", "From a transfer's opening to its last block", _WAN_SECONDS
        )
        self._ttft = make.histogram(
            "time_to_first_token_seconds", "From request to first token, streams", _LATENCY, "path"
        )
        self._first_tokens = make.counter(
            "first_tokens", "First tokens of answers, by the leg whose engine gave them", "from"
        )
        at_zero(self._first_tokens, ("prefill", "decode"))
        self._relayed = make.counter(
            "relayed_tokens",
            "Tokens after the first, from an engine that prefills, by relay decode",
        )
        self._gap = make.histogram(
            "largest_gap_seconds", "Longest time between two outputs of a stream", _GAP, "path"
        )
        self._e2e = make.histogram(
            "e2e_request_latency_seconds", "From request to last byte", _LATENCY, "path"
        )
        self._off = make.histogram(
            "ttft_over_predicted_ratio",
            "Time to first token divided by its prediction",
            _RATIOS,
            "path",
        )
        self._refused = make.counter(
            "requests_refused",
            "Requests that no engine could serve, or not within the target",
            "reason",
        )
        at_zero(self._refused, RefusalReason)
        self._in_flight = make.gauge("requests_in_flight", "Requests being served")
        self._connected = make.gauge(
            "pool_connected", "1 while the event stream of a pool is connected", "pool"
        )
        self._blocks = make.gauge("index_blocks", "Known blocks of a pool", "pool")
        self._index = make.gauge("index_state", "1 at the index's state", "pool", "state")
        self._ready = make.gauge(
            "engine_ready", "1 while an engine is ready; role: of its cluster", "engine", "role"
        )
        self._detached = make.gauge(
            "engine_detached",
            "1 while an engine is ready and its connected pool node does not announce it",
            "engine",
        )
        self._layout = make.gauge(
            "layout_mismatch",
            "Facts in which an engine's KV layout differs from the PD cluster's; 0 if none does",
            "engine",
        )
        self._retries = make.counter("retries", "Retried legs", "outcome")
        at_zero(self._retries, ("made", "over_budget"))
        self._suspects = make.counter(
            "suspect_prompts",
            "Requests on an engine when it died, by outcome",
            "outcome",
        )
        at_zero(self._suspects, ("waited", "cleared", "refused"))
        self._rehearsals = make.counter(
            "rehearsals", "Rehearsals of requests by the decode engine before a prefill", "outcome"
        )
        at_zero(self._rehearsals, ("passed", "refused", "unknown"))
        self._breaker = make.gauge("breaker_state", "1 at a breaker's state", "target", "state")
        self._connections = make.gauge("client_connections", "Open connections of clients")
        self._closed = make.counter(
            "client_connections_closed",
            "Connections of clients that the gateway closed before they ended",
            "reason",
        )

    def follow(self, facts: FactStream) -> None:
        """Count changes of settings, requests without a right, and transfers."""
        facts.subscribe(SettingChanged, lambda fact: self.control.changed(fact.change))
        facts.subscribe(RequestRefused, self._refused_right)
        facts.subscribe(TransferArrived, lambda fact: self._arrived(fact.view))

    def _refused_right(self, fact: RequestRefused) -> None:
        if not fact.operator:
            self.tenants.unauthorized()

    def watch(
        self,
        engines: Engines,
        pools: Pools,
        index: PrefixIndex,
        driver: Driver,
        layouts: LayoutCheck,
        guards: Guards,
    ) -> None:
        """Read the gauges from the live objects whenever somebody scrapes."""
        self.control.watch(driver)
        for engine in engines.by_name.values():
            self._ready.labels(engine.name, engine.role.value).set_function(
                partial(getattr, engine, "is_ready")
            )
            self._detached.labels(engine.name).set_function(partial(_is_detached, engine, pools))
            num_differences = partial(layouts.num_differences, engine.name)
            self._layout.labels(engine.name).set_function(num_differences)
        for pool in pools.names():
            self._connected.labels(pool).set_function(partial(pools.is_live, pool))
            self._blocks.labels(pool).set_function(partial(index.num_blocks, pool))
            show_state(self._index, pool, states=SourceState, read=partial(index.state, pool))
        for target, breaker in guards.breakers.items():
            read = partial(getattr, breaker, "state")
            show_state(self._breaker, label_of(target), states=BreakerState, read=read)

    def watch_connections(self, connections: ClientsCounted) -> None:
        """Show how many there are, and count those that the gateway closes."""
        self._connections.set_function(lambda: connections.num_open)
        for why in Closed:
            self._closed.labels(why.value)
        connections.on_closed = lambda why: self._closed.labels(why.value).inc()

    def retried(self, outcome: str) -> None:
        """A leg was run again ("made"), or would have been ("over_budget")."""
        self._retries.labels(outcome).inc()

    def suspect(self, outcome: str) -> None:
        """A prompt that an engine died with "waited", was "cleared" or was "refused"."""
        self._suspects.labels(outcome).inc()

    def rehearsed(self, outcome: str) -> None:
        """A rehearsal: the engine accepted ("passed"), "refused", or no answer ("unknown")."""
        self._rehearsals.labels(outcome).inc()

    def began(self) -> None:
        """A request came in."""
        self._in_flight.inc()
        self._totals.num_in_flight += 1

    def decided(self, record: RequestRecord) -> None:
        """A request was routed."""
        self.control.decided(record)
        if record.decision:
            self._decisions.labels(record.path, record.decision.reason.value).inc()
        if record.refusal:
            self._refused.labels(record.refusal.value).inc()
            self._totals.num_refused += 1

    def fell_back(self, record: RequestRecord) -> None:
        """A request left the remote path, or gained nothing from it."""
        if record.fallback:
            stage, reason = record.fallback.stage, record.fallback.reason
            self._fallbacks.labels(stage, label(stage, reason)).inc()
            self._totals.num_fallbacks += stage != "decode" and (stage, reason) != _CLIENTS_FAULT

    def _arrived(self, transfer: TransferView) -> None:
        """A transfer ended at its destination."""
        link, num_bytes = (transfer.source, transfer.destination), transfer.num_bytes
        self._kv_bytes.labels(*link).inc(num_bytes)
        self._totals.link_bytes[link] = self._totals.link_bytes.get(link, 0) + num_bytes
        self.control.arrived(transfer)
        if transfer.num_bytes:
            self._transfer.observe(transfer.duration_ns / NS_PER_S)

    def ended(self, record: RequestRecord) -> None:
        """A request ended, whichever way."""
        self._in_flight.dec()
        self._totals.num_in_flight -= 1
        path = record.path
        if record.outcome is not Outcome.REJECTED:
            self._totals.num_remote += path == Path.REMOTE
            self._totals.num_local += path == Path.LOCAL
        self._requests.labels(path, record.outcome.value).inc()
        self.tenants.ended(record)
        if (leg := first_token_from(record)) is not None:
            self._first_tokens.labels(leg).inc()
        self._relayed.inc(record.relay.num_tokens)
        if record.outcome is not Outcome.FINISHED:
            return
        self._prompt_tokens.labels(path).inc(record.num_prompt_tokens)
        self._cached_tokens.labels(path).inc(record.cached_tokens or 0)
        if record.ttft_ns is not None:
            self._ttft.labels(path).observe(record.ttft_ns / NS_PER_S)
        if record.gap_ns:
            self._gap.labels(path).observe(record.gap_ns / NS_PER_S)
        if record.ttft_over_predicted is not None:
            self._off.labels(path).observe(record.ttft_over_predicted)
        if record.e2e_ns is not None:
            self._e2e.labels(path).observe(record.e2e_ns / NS_PER_S)

    def totals(self) -> Totals:
        """Sums over labels, of this moment."""
        return replace(self._totals, link_bytes=dict(self._totals.link_bytes))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self.on_read()
        return generate_latest(self.registry)


def _is_detached(engine: Engine, pools: Pools) -> bool:
    return engine.is_ready and pools.lacks(engine.pool, engine.name)
