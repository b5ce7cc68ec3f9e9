"""Metrics of the engines' KV events."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.gateway.engines.kv_event_codec import Batch
from prfaas.gateway.engines.kv_event_subscriber import Fault


class EventMetrics:
    """Metrics of KV events and of the index's size.

    Args:
        registry: Gets the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._events = Counter(
            "prfaas_kv_events",
            "KV events of engines: applied, about other media, of unknown kinds",
            ("engine", "kind"),
            registry=registry,
        )
        self._faults = Counter(
            "prfaas_kv_event_faults",
            "Faults of an engine's KV events: connections lost, gaps, replays not answered",
            ("engine", "kind"),
            registry=registry,
        )
        self._state = Gauge(
            "prfaas_engine_index_state",
            "1 at the index's state of an engine's device memory",
            ("engine", "state"),
            registry=registry,
        )
        self._blocks = Gauge(
            "prfaas_engine_index_blocks",
            "Known blocks in an engine's device memory",
            ("engine",),
            registry=registry,
        )
        self._memory = Gauge(
            "prfaas_index_memory_bytes", "Memory of the prefix index's table", registry=registry
        )

    def watch(self, index: PrefixIndex, engines: Iterable[str]) -> None:
        """Read the gauges from the index whenever somebody scrapes."""
        self._memory.set_function(lambda: index.num_bytes)
        for engine in engines:
            for kind in Fault:
                self._faults.labels(engine, kind)
            self._blocks.labels(engine).set_function(partial(index.num_blocks, engine))
            for state in SourceState:
                gauge = self._state.labels(engine, state.value)
                gauge.set_function(partial(_is_at, index, engine, state))

    def applied(self, engine: str, batch: Batch) -> None:
        """A batch of an engine was applied."""
        num_applied = batch.num_events - batch.num_elsewhere - batch.num_unknown
        self._events.labels(engine, "applied").inc(num_applied)
        if batch.num_elsewhere:
            self._events.labels(engine, "elsewhere").inc(batch.num_elsewhere)
        if batch.num_unknown:
            self._events.labels(engine, "unknown").inc(batch.num_unknown)

    def failed(self, engine: str, fault: Fault) -> None:
        """A subscription to an engine has failed."""
        self._faults.labels(engine, fault).inc()


def _is_at(index: PrefixIndex, engine: str, state: SourceState) -> float:
    return float(index.state(engine) is state)
