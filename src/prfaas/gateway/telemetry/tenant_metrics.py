"""Prometheus metrics of each tenant. The number of tenants is bounded by the deployment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from prfaas.gateway.telemetry.request_record import Record
from prfaas.gateway.tenancy.tenants import Tenant, Tenants


class TenantMetrics:
    """Counters by tenant.

    Args:
        registry: Where they are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = self._counter("requests", "Requests by outcome", "outcome")
        self._rejected = self._counter("rejected", "Requests refused with 429", "reason")
        self._tokens = self._counter("tokens", "Tokens of requests", "kind")
        self._shipped = self._counter("link_bytes", "Bytes that transfers were signed for")
        self._in_flight = Gauge(
            "prfaas_tenant_requests_in_flight",
            "Requests being served, counted by their prompts times n",
            ("tenant",),
            registry=registry,
        )
        self._held = Gauge(
            "prfaas_tenant_requests_held",
            "Requests that wait in the gateway for a slot",
            ("tenant",),
            registry=registry,
        )
        self._unauthorized = Counter(
            "prfaas_unauthorized", "Requests without a valid key", registry=registry
        )

    def watch(self, tenants: Tenants, num_held: Callable[[str], int]) -> None:
        """Read gauges whenever somebody scrapes.

        Args:
            tenants: All tenants.
            num_held: Requests of a tenant that wait, by its name.
        """
        for name, tenant in tenants.by_name.items():
            self._in_flight.labels(name).set_function(partial(_num_in_flight, tenant))
            self._held.labels(name).set_function(partial(_as_float, num_held, name))

    def unauthorized(self) -> None:
        """A request had no valid key."""
        self._unauthorized.inc()

    def ended(self, record: Record) -> None:
        """A request ended, whichever way."""
        self._requests.labels(record.tenant, record.outcome.value).inc()
        if record.rejected:
            self._rejected.labels(record.tenant, record.rejected).inc()
        self._shipped.labels(record.tenant).inc(record.signed_bytes)
        counts = (
            ("prompt", record.num_prompt_tokens),
            ("cached", record.cached_tokens or 0),
            ("output", record.num_output_tokens),
            ("abandoned", record.num_abandoned_tokens),
        )
        for kind, count in counts:
            self._tokens.labels(record.tenant, kind).inc(count)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"prfaas_tenant_{name}", what, ("tenant", *labels), registry=self._registry)


def _as_float(count: Callable[[str], int], tenant: str) -> float:
    return float(count(tenant))


def _num_in_flight(tenant: Tenant) -> float:
    return float(tenant.quota.num_in_flight)
