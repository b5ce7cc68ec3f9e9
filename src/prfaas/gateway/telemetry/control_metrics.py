"""Prometheus metrics of decisions, loops, KV events of engines, and tenants.

The number of tenants is bounded by the deployment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial

from prometheus_client import Gauge

from prfaas.core.control.changes import ChangeEntry
from prfaas.core.control.role_loop import Role
from prfaas.core.dispatch.links import Link
from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.routing.calibration import Calibration
from prfaas.gateway.engines.kv_event_subscriber import SubscriptionFault, SubscriptionObserver
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.gateway.tenancy.tenants import Tenants
from prfaas.series import Families
from prfaas.units import BYTES_PER_TB, NS_PER_S
from prfaas.wire.kv_events import KvEventBatch


def show_state(
    gauge: Gauge, *labels: str, states: Iterable[Enum], read: Callable[[], object]
) -> None:
    """Show 1 at the state that `read` returns on each scrape, the last label, and 0 at others."""
    for state in states:
        gauge.labels(*labels, state.value).set_function(partial(_is_at, read, state))


def _is_at(read: Callable[[], object], state: Enum) -> float:
    return float(read() is state)


class EventMetrics(SubscriptionObserver):
    """Metrics of KV events and of the index's size."""

    def __init__(self, make: Families) -> None:
        self._events = make.counter(
            "kv_events",
            "KV events of engines: applied, about other media, of unknown kinds",
            *("engine", "kind"),
        )
        self._faults = make.counter(
            "kv_event_faults",
            "Faults of an engine's KV events: connections lost, gaps, replays not answered",
            *("engine", "kind"),
        )
        self._state = make.gauge(
            "engine_index_state",
            "1 at the index's state of an engine's device memory",
            *("engine", "state"),
        )
        self._blocks = make.gauge(
            "engine_index_blocks", "Known blocks in an engine's device memory", "engine"
        )
        self._memory = make.gauge("index_memory_bytes", "Memory of the prefix index's table")

    def watch(self, index: PrefixIndex, engines: Iterable[str]) -> None:
        """Read the gauges from the index whenever somebody scrapes."""
        self._memory.set_function(lambda: index.num_bytes)
        for engine in engines:
            for kind in SubscriptionFault:
                self._faults.labels(engine, kind)
            self._blocks.labels(engine).set_function(partial(index.num_blocks, engine))
            show_state(self._state, engine, states=SourceState, read=partial(index.state, engine))

    def applied(self, engine: str, batch: KvEventBatch) -> None:
        """A batch of an engine was applied."""
        num_applied = batch.num_events - batch.num_elsewhere - batch.num_unknown
        self._events.labels(engine, "applied").inc(num_applied)
        if batch.num_elsewhere:
            self._events.labels(engine, "elsewhere").inc(batch.num_elsewhere)
        if batch.num_unknown:
            self._events.labels(engine, "unknown").inc(batch.num_unknown)

    def failed(self, engine: str, fault: SubscriptionFault) -> None:
        """A subscription to an engine has failed."""
        self._faults.labels(engine, fault).inc()


class TenantMetrics:
    """Counters by tenant."""

    def __init__(self, make: Families) -> None:
        self._requests = make.counter("tenant_requests", "Requests by outcome", "tenant", "outcome")
        self._rejected = make.counter(
            "tenant_rejected", "Requests refused with 429", "tenant", "reason"
        )
        self._lossy = make.counter(
            "tenant_lossy_requests", "Requests of a lossy quality class", "tenant", "quality"
        )
        self._tokens = make.counter("tenant_tokens", "Tokens of requests", "tenant", "kind")
        self._shipped = make.counter(
            "tenant_link_bytes", "Bytes that transfers were signed for", "tenant"
        )
        self._in_flight = make.gauge(
            "tenant_requests_in_flight",
            "Requests being served, counted by their prompts times n",
            "tenant",
        )
        self._held = make.gauge(
            "tenant_requests_held", "Requests that wait in the gateway for a slot", "tenant"
        )
        self._cache = make.gauge(
            "tenant_cache_bytes",
            "Bytes of blocks in the memory and on the disks of all pool nodes",
            "tenant",
            "tier",
        )
        self._unauthorized = make.counter("unauthorized", "Requests without a valid key")

    def watch(self, tenants: Tenants, num_held: Callable[[str], int], pools: Pools) -> None:
        """Read gauges whenever somebody scrapes; `num_held` counts a tenant's waiting requests."""
        for name, tenant in tenants.by_name.items():
            tag = tenant_tag(tenant.cache_salt)
            for tier in ("host", "disk"):
                cache = self._cache.labels(name, tier)
                cache.set_function(partial(pools.tenant_bytes, tag, f"{tier}_bytes"))
            num_in_flight = partial(getattr, tenant.quota, "num_in_flight")
            self._in_flight.labels(name).set_function(num_in_flight)
            self._held.labels(name).set_function(partial(num_held, name))

    def unauthorized(self) -> None:
        """A request had no valid key."""
        self._unauthorized.inc()

    def ended(self, record: RequestRecord) -> None:
        """A request ended, whichever way."""
        self._requests.labels(record.tenant, record.outcome.value).inc()
        if record.rejected:
            self._rejected.labels(record.tenant, record.rejected).inc()
        if record.quality.is_lossy:
            self._lossy.labels(record.tenant, record.quality).inc()
        self._shipped.labels(record.tenant).inc(record.signed_bytes)
        counts = (
            ("prompt", record.num_prompt_tokens),
            ("cached", record.cached_tokens or 0),
            ("output", record.num_output_tokens),
            ("abandoned", record.num_abandoned_tokens),
        )
        for kind, count in counts:
            self._tokens.labels(record.tenant, kind).inc(count)


def _backlog_s(driver: Driver, cluster: str) -> float:
    dispatcher = driver.dispatcher
    found = sum(dispatcher.load(name).pending_ns(name) for name in driver.states.of(cluster))
    return found / NS_PER_S


THRESHOLD = "offload_threshold_tokens"
LINK_GAUGES: Mapping[str, tuple[str, Callable[[Link], float]]] = {
    THRESHOLD: (
        "New tokens above which a prompt is offloaded",
        lambda link: link.policy.offload_threshold,
    ),
    "route_link_up": ("1 while routing may use a link", lambda link: link.up),
    "route_link_promised_bytes": (
        "Bytes of KV cache reserved on a link for open requests and copies",
        lambda link: link.book.promised_bytes,
    ),
    "route_link_goodput_bytes_per_second": (
        "Rate of a link used by decisions; 0 while unknown",
        lambda link: link.book.bits_per_s / 8,
    ),
    "route_link_utilisation_ratio": (
        "Share of the time in which bytes waited for a link, mean of the last half minute",
        lambda link: link.book.mean_utilisation(time.monotonic_ns()),
    ),
    "route_link_rtt_seconds": (
        "Round trip of a link used by decisions; NaN while unknown",
        lambda link: link.book.rtt_ns / NS_PER_S or math.nan,
    ),
}


PREDICTION_GAUGES: Mapping[str, tuple[str, Callable[[Calibration], float]]] = {
    "prediction_correction_ratio": (
        "Factor by which predictions of a path are corrected; below 0.5 or above 2 the plan's "
        "profiles do not match this deployment",
        lambda calibration: calibration.factor,
    ),
    "prediction_error_ratio": (
        "Typical factor, at least 1, between a corrected prediction and the observation",
        lambda calibration: calibration.error_ratio,
    ),
    "prediction_proven": (
        "1 while a path's predictions are accurate enough for `ttft_max`",
        lambda calibration: calibration.is_proven(time.monotonic_ns()),
    ),
}


class ControlMetrics:
    """Gauges of what routing knows, and counters of what it found and moved."""

    def __init__(self, make: Families) -> None:
        ends = ("source", "destination")
        self._links = {
            name: make.gauge(name, what, *ends) for name, (what, _) in LINK_GAUGES.items()
        }
        self._predictions = {
            name: make.gauge(name, what, "path", "cluster")
            for name, (what, _) in PREDICTION_GAUGES.items()
        }
        self._plan_bytes = make.gauge(
            "plan_bytes_correction_ratio",
            "Factor by which the plan's bytes of a prompt are corrected; below 0.5 or above 2 the "
            "plan's model is not the one that is served",
        )
        self._loop_actions = make.counter(
            "loop_actions",
            "Changes by the control loops, breakers and the operator",
            *("loop", "action"),
        )
        self._frozen = make.gauge("loops_frozen", "1 while the loops are frozen")
        self._roles = make.gauge(
            "engine_role",
            "1 at the role of a PD engine, if engines have roles",
            *("engine", "role"),
        )
        self._backlog = make.gauge(
            "prefill_backlog_seconds",
            "Unfinished prefill work of a cluster, in seconds of one engine; "
            "without a plan a prompt token counts as 0.1 ms",
            "cluster",
        )
        self._hits = make.counter(
            "prefix_hit_tokens",
            "Prompt tokens that a cluster held when the request was routed",
            "cluster",
        )
        self._looked_up = make.counter(
            "prefix_lookup_tokens", "Prompt tokens that were looked up in the clusters' caches"
        )
        self._cost = make.counter(
            "kv_cost", "Price of the KV cache that arrived, in the currency of the plan", *ends
        )
        self._pulls = make.counter(
            "pulls", "Pulls of prefixes for requests, by outcome", *ends, "outcome"
        )
        self._pulled = make.counter(
            "pulled_tokens", "Prompt tokens that engines loaded after a pull", *ends
        )
        self._local = ""
        self._prices: dict[tuple[str, str], float] = {}

    def watch(self, driver: Driver) -> None:
        """Read the gauges from the live objects whenever somebody scrapes."""
        self._local, self._prices = driver.local, driver.price_per_tb
        for link in driver.dispatcher.links:
            for name, (_, value) in LINK_GAUGES.items():
                if name == THRESHOLD and link.is_in_site:
                    continue
                gauge = self._links[name].labels(link.source, link.destination)
                gauge.set_function(partial(value, link))
        for (path, cluster), calibration in driver.dispatcher.calibrations.items():
            for name, (_, read) in PREDICTION_GAUGES.items():
                gauge = self._predictions[name].labels(path.value, cluster)
                gauge.set_function(partial(read, calibration))
        self._plan_bytes.set_function(lambda: driver.dispatcher.carried.factor)
        for cluster in dict.fromkeys(driver.states.cluster_of.values()):
            self._backlog.labels(cluster).set_function(partial(_backlog_s, driver, cluster))
        if driver.split is not None:
            for engine in driver.split.names:
                role_of = partial(driver.split.role_of, engine)
                show_state(self._roles, engine, states=Role, read=role_of)

    def watch_loops(self, is_frozen: Callable[[], float]) -> None:
        """Show whether the loops stand still."""
        self._frozen.set_function(is_frozen)

    def changed(self, entry: ChangeEntry) -> None:
        """A loop or the operator changed something."""
        self._loop_actions.labels(entry.loop.value, entry.action).inc()

    def decided(self, record: RequestRecord) -> None:
        """A request was routed: count what the clusters held of it."""
        if record.considered is None:
            return
        self._looked_up.inc(record.num_prompt_tokens)
        self._hits.labels(self._local).inc(record.pd_hit_tokens)
        for option in record.considered.options:
            if option.cluster.name:
                self._hits.labels(option.cluster.name).inc(option.facts.prfaas_hit_tokens)

    def arrived(self, transfer: TransferView) -> None:
        """A transfer ended at its destination: count what it cost."""
        link = transfer.source, transfer.destination
        price = self._prices.get(link, 0.0)
        self._cost.labels(*link).inc(transfer.num_bytes * price / BYTES_PER_TB)

    def pulled(self, link: tuple[str, str], outcome: str, num_tokens: int) -> None:
        """A request that had a prefix pulled is over, and did not compute these tokens."""
        self._pulls.labels(*link, outcome).inc()
        self._pulled.labels(*link).inc(num_tokens)
