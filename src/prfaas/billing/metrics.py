"""Metrics of usage: the counters of what the audit log records."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from prfaas.core.billing.usage import Amounts, UsageKey
from prfaas.units import NS_PER_S

_LABELS = ("tenant", "phase", "cluster", "class")


class UsageMetrics:
    """Counters of a gateway; those of usage grow when it is recorded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"prfaas_usage_{name}", text, _LABELS, registry=registry)

        self._count = counter("operations", "Prefills that were booked, and decodes that ended")
        self._tokens = counter("tokens", "Prompt tokens to compute, and output tokens")
        self._engine = counter("engine_seconds", "Work of an instance for prefills")
        self._slot = counter("slot_seconds", "Time of sequences in instances that decode")

        self._saved = Counter(
            "prfaas_tenant_saved_seconds",
            "Work of an instance that cached prefixes saved; 0 without a plan",
            ("tenant", "cluster"),
            registry=registry,
        )

    def saved(self, key: UsageKey, saved_ns: int) -> None:
        """A prefill was booked whose cached prefix saves work."""
        self._saved.labels(key.tenant, key.cluster).inc(saved_ns / NS_PER_S)

    def used(self, key: UsageKey, amounts: Amounts) -> None:
        """Usage was recorded."""
        self._count.labels(*key).inc(amounts.count)
        self._tokens.labels(*key).inc(amounts.tokens)
        self._engine.labels(*key).inc(amounts.engine_ns / NS_PER_S)
        self._slot.labels(*key).inc(amounts.slot_ns / NS_PER_S)


def storage_counter(registry: CollectorRegistry) -> Counter:
    """The counter of a pool node, by tier."""
    return Counter(
        "prfaas_usage_storage_byte_seconds",
        "Bytes of KV blocks held, times seconds",
        ("tier",),
        registry=registry,
    )
