"""Metrics of clients' connections."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from prfaas.gateway.http.connections import Closed, Connections


class ConnectionMetrics:
    """Metrics of clients' connections.

    Args:
        registry: Gets the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge(
            "prfaas_client_connections",
            "Open connections of clients",
            registry=registry,
        )
        self._closed = Counter(
            "prfaas_client_connections_closed",
            "Connections of clients that the gateway closed before they ended",
            ("reason",),
            registry=registry,
        )

    def watch(self, connections: Connections) -> None:
        """Show how many there are, and count what is closed."""
        self._open.set_function(lambda: connections.num_open)
        for why in Closed:
            self._closed.labels(why.value)
        connections.on_closed = self.closed

    def closed(self, why: Closed) -> None:
        """The gateway closed a connection."""
        self._closed.labels(why.value).inc()
