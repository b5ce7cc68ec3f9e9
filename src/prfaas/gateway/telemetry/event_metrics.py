"""Metrics of the engines' KV events."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prfaas.core.kv.prefix_index import PrefixIndex, SourceState
from prfaas.gateway.engines.kv_event_subscriber import SubscriptionFault, SubscriptionObserver
from prfaas.gateway.telemetry.families import Families, show_state
from prfaas.wire.kv_events import KvEventBatch


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
