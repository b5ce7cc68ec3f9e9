"""Metrics of a proxy, by site."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prfaas.audit.metrics import AuditMetrics
from prfaas.wire.renewal import identity_gauge

WAITS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class ProxyMetrics:
    """Counters and gauges of one proxy, in a separate registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.audit = AuditMetrics(registry, "prfaas_proxy")
        self.identity_ends = identity_gauge("proxy", registry)
        self.requests = Counter(
            "prfaas_proxy_requests",
            "Prefills of a site by outcome: ok, failed (the engine), left (by the gateway), "
            "refused (by the contract) or invalid.",
            ["site", "outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "prfaas_proxy_tokens",
            "Prompt tokens of a site: asked, and computed, which its share counts.",
            ["site", "kind"],
            registry=registry,
        )
        self.held_seconds = Counter(
            "prfaas_proxy_held_seconds",
            "Time that requests of a site were at engines.",
            ["site"],
            registry=registry,
        )
        self.waited = Histogram(
            "prfaas_proxy_waited_seconds",
            "Time that prefills of a site waited for their turn.",
            ["site"],
            buckets=WAITS_S,
            registry=registry,
        )
        self.refused = Counter(
            "prfaas_proxy_refused",
            "Requests that were refused, by reason: unknown (no site has this certificate), "
            "no_contract, queue_full, memory, salt (the tag is another site's), path or "
            "connections (beyond the limit of the site).",
            ["reason"],
            registry=registry,
        )
        self.waiting = Gauge(
            "prfaas_proxy_waiting",
            "Prefills that wait for their turn.",
            ["site"],
            registry=registry,
        )
        self.connections = Gauge(
            "prfaas_proxy_connections",
            "Connections of gateways of a site.",
            ["site"],
            registry=registry,
        )
