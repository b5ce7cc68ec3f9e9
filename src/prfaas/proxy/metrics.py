"""Metrics and usage of a proxy, by site."""

from __future__ import annotations

from prfaas.audit.metrics import AuditMetrics
from prfaas.core.billing.usage import Amounts, Meter, UsageKey, UsagePhase
from prfaas.membership.views import PartRegistry
from prfaas.series import Families
from prfaas.units import NS_PER_S
from prfaas.wire.renewal import identity_gauge

WAITS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class ProxyMetrics:
    """Counters and gauges of one proxy, in a separate registry, and its meter for the bill."""

    def __init__(self) -> None:
        self.registry, self.meter = PartRegistry(), Meter()
        make = Families(self.registry)
        self.audit = AuditMetrics(self.registry, "proxy")
        self.identity_ends = identity_gauge("proxy", self.registry)
        self.requests = make.counter(
            "proxy_requests",
            "Prefills of a site by outcome: ok, failed (the engine), left (by the gateway), "
            "refused (by the contract) or invalid.",
            *("site", "outcome"),
        )
        self.tokens = make.counter(
            "proxy_tokens",
            "Prompt tokens of a site: asked, and computed, which its share counts.",
            *("site", "kind"),
        )
        self.held_seconds = make.counter(
            "proxy_held_seconds", "Time that requests of a site were at engines.", "site"
        )
        self.waited = make.histogram(
            "proxy_waited_seconds",
            "Time that prefills of a site waited for their turn.",
            WAITS_S,
            "site",
        )
        self.refused = make.counter(
            "proxy_refused",
            "Requests that were refused, by reason: unknown (no site has this certificate), "
            "no_contract, queue_full, memory, salt (the tag is another site's), path or "
            "connections (beyond the limit of the site).",
            "reason",
        )
        self.waiting = make.gauge("proxy_waiting", "Prefills that wait for their turn.", "site")
        self.connections = make.gauge(
            "proxy_connections", "Connections of gateways of a site.", "site"
        )

    def asked(self, site: str, num_tokens: int, waited_ns: int) -> None:
        """It is the turn of a prompt of a site."""
        self.waited.labels(site).observe(waited_ns / NS_PER_S)
        self.tokens.labels(site, "asked").inc(num_tokens)

    def used(self, site: str, computed: int, held_ns: int) -> None:
        """An engine has computed so many tokens of a prompt in a time, ns."""
        self.tokens.labels(site, "computed").inc(computed)
        self.held_seconds.labels(site).inc(held_ns / NS_PER_S)
        key = UsageKey(site, UsagePhase.PREFILL_REMOTE, "", "")
        self.meter.add(key, Amounts(1, computed, held_ns))
