"""OpenTelemetry spans of transfers: one at either end, below the gateway's span of the same.

Their parent is in the ticket: W3C context that the gateway signed. A span is made when its
transfer is over, from what is known of it by then: nothing is done for it while blocks move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prfaas.core.transfer.facts import RECEIVED, SENT, TransferDone
from prfaas.core.transfer.transfer_state import Transfer, TransferState
from prfaas.telemetry import make_provider

REASON_CHARS_MAX = 200
_NAMES = {SENT: "kv send", RECEIVED: "kv receive"}


class TransferSpans:
    """Sends spans of the transfers that a gateway traces.

    Args:
        endpoint: Collector that takes OTLP over HTTP.
    """

    def __init__(self, endpoint: str, pool: str, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._pool = pool
        self._unix_ns = unix_ns
        self._provider = make_provider(endpoint, "prfaas-pool", pool)
        self._tracer = self._provider.get_tracer("prfaas")

    def ended(self, fact: TransferDone) -> None:
        """A transfer is over."""
        direction, transfer, now_ns = fact.direction, fact.transfer, fact.now_ns
        if not transfer.trace:
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended_ns = self._unix_ns()
        span = self._tracer.start_span(
            _NAMES[direction],
            context=TraceContextTextMapPropagator().extract({"traceparent": transfer.trace}),
            kind=SpanKind.PRODUCER if direction == SENT else SpanKind.CONSUMER,
            start_time=ended_ns - (now_ns - transfer.opened_at_ns),
            attributes=self._attributes(direction, transfer),
        )
        for name, at_ns in (
            ("first block", transfer.first_block_at_ns),
            ("last block", transfer.last_block_at_ns),
        ):
            if at_ns:
                span.add_event(name, timestamp=ended_ns - (now_ns - at_ns))
        if transfer.state is not TransferState.COMMITTED:
            span.set_status(StatusCode.ERROR)
        span.end(end_time=ended_ns)

    def _attributes(self, direction: str, transfer: Transfer) -> dict[str, Any]:
        ends = (self._pool, transfer.peer) if direction == SENT else (transfer.peer, self._pool)
        said = {
            "prfaas.transfer.id": transfer.transfer_id.hex(),
            "prfaas.transfer.state": transfer.state.value,
            "prfaas.kv.bytes": transfer.num_bytes,
            "prfaas.kv.blocks": transfer.num_blocks,
            "prfaas.pool.source": ends[0],
            "prfaas.pool.destination": ends[1],
        }
        if transfer.reason:
            said["prfaas.transfer.reason"] = transfer.reason[:REASON_CHARS_MAX]
        if transfer.num_missing:
            said["prfaas.kv.blocks_missing"] = transfer.num_missing
        return said

    def close(self) -> None:
        """Send pending spans. Blocks for up to a few seconds if the collector is unreachable."""
        self._provider.shutdown()
