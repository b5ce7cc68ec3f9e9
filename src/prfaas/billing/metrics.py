"""Metrics of usage: the counters of what the audit log records."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from prfaas.core.billing.usage import Amounts, UsageKey
from prfaas.series import Families
from prfaas.units import NS_PER_S

_LABELS = ("tenant", "phase", "cluster", "class")


class UsageMetrics:
    """Counters of a gateway; those of usage grow when it is recorded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Families(registry)
        self._count = make.counter(
            "usage_operations", "Prefills that were booked, and decodes that ended", *_LABELS
        )
        self._tokens = make.counter(
            "usage_tokens", "Prompt tokens to compute, and output tokens", *_LABELS
        )
        self._engine = make.counter(
            "usage_engine_seconds", "Work of an instance for prefills", *_LABELS
        )
        self._slot = make.counter(
            "usage_slot_seconds", "Time of sequences in instances that decode", *_LABELS
        )
        self._saved = make.counter(
            "tenant_saved_seconds",
            "Work of an instance that cached prefixes saved; 0 without a plan",
            "tenant",
            "cluster",
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
    return Families(registry).counter(
        "usage_storage_byte_seconds", "Bytes of KV blocks held, times seconds", "tier"
    )
