"""Prometheus metrics of each tenant. The number of tenants is bounded by the deployment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.gateway.pools.pool_client import Pools
from prfaas.gateway.telemetry.families import Families
from prfaas.gateway.telemetry.request_record import RequestRecord
from prfaas.gateway.tenancy.tenants import Tenants


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
