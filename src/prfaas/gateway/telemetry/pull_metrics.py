"""Prometheus metrics of pulls. The number of links is bounded by the deployment."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class PullMetrics:
    """Counters by link.

    Args:
        registry: Where they are shown.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        link = ("source", "destination")
        self._pulls = Counter(
            "prfaas_pulls",
            "Pulls of prefixes for requests, by outcome",
            (*link, "outcome"),
            registry=registry,
        )
        self._tokens = Counter(
            "prfaas_pulled_tokens",
            "Prompt tokens that engines loaded after a pull",
            link,
            registry=registry,
        )

    def ended(self, link: tuple[str, str], outcome: str, num_tokens: int) -> None:
        """A request that had a prefix fetched is over, and was saved computing this number of
        tokens."""
        self._pulls.labels(*link, outcome).inc()
        self._tokens.labels(*link).inc(num_tokens)
