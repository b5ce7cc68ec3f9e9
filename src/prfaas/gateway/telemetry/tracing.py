"""OpenTelemetry spans of requests: one for the whole, one for each leg, one for the transfer.

The span of the whole begins with the request, so that engines hang their own spans under it by the
W3C context in both legs' headers. That of the transfer begins with the transfer, and pool nodes
hang theirs under it by the context in its ticket. The others are made when the request is over,
from what was noted about it. Names follow the `gen_ai` conventions. No prompt, answer or key is in
any of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.config.services import TracingTable
from prfaas.core.request.events import Outcome
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.telemetry import is_sampled, is_traceparent, make_provider
from prfaas.units import NS_PER_S, seconds_of

TRANSFER = "kv transfer"
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}


@dataclass(slots=True)
class RequestTrace:
    """One request's place in a trace."""

    headers: Mapping[str, str]
    """W3C context for both legs."""
    tracer: Any = None
    """Makes the spans below; None where nothing is recorded."""
    span: Any = None
    transfer: Any = None
    """Of its transfer, once that has begun."""

    def of_transfer(self, record: RequestRecord) -> str:
        """The transfer of this request begins, and its span with it.

        Returns:
            W3C context for what the pools do; empty if nobody records it.
        """
        if self.span is None:
            parent = self.headers.get("traceparent", "")
            return parent if is_sampled(parent) else ""
        if not self.span.is_recording():
            return ""
        from opentelemetry.trace import set_span_in_context

        if self.transfer is None:
            self.transfer = self.tracer.start_span(
                TRANSFER,
                context=set_span_in_context(self.span),
                start_time=round(record.started_unix_s * NS_PER_S) + (record.decided_ns or 0),
            )
        return _context_of(self.transfer).get("traceparent", "")

    def end(self, record: RequestRecord, model: str) -> None:
        """The request is over."""
        if self.span is None:
            return
        began_ns = round(record.started_unix_s * NS_PER_S)
        if self.span.is_recording():
            _describe(self.span, record, model)
            for part in parts_of(record):
                if part.name == TRANSFER and self.transfer is not None:
                    self.transfer.set_attributes(dict(part.attributes))
                    self.transfer.end(end_time=began_ns + max(part.to_ns, part.from_ns))
                else:
                    self._below(part, began_ns)
        self.span.end(end_time=began_ns + (record.e2e_ns or 0))

    def _below(self, part: SpanPart, began_ns: int) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self.tracer.start_span(
            part.name,
            context=set_span_in_context(self.span),
            kind=SpanKind.CLIENT if part.engine else SpanKind.INTERNAL,
            start_time=began_ns + part.from_ns,
            attributes=dict(part.attributes),
        )
        span.end(end_time=began_ns + max(part.to_ns, part.from_ns))


class Tracing:
    """Sends spans to a collector, from a thread of its own.

    Args:
        table: Where to; None sends nothing and passes the client's context on.
    """

    def __init__(self, table: TracingTable | None, service: str) -> None:
        self._provider = (
            make_provider(table.endpoint, "prfaas-gateway", service, table.sample_ratio)
            if table is not None
            else None
        )
        self._tracer = self._provider.get_tracer("prfaas") if self._provider else None

    def begin(self, record: RequestRecord, headers: Mapping[str, str], model: str) -> RequestTrace:
        """A request came in."""
        context = _context_in(headers)
        if self._tracer is None:
            return RequestTrace(context)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            f"{_OPERATIONS[record.api]} {model}",
            context=TraceContextTextMapPropagator().extract(context),
            kind=SpanKind.SERVER,
            start_time=round(record.started_unix_s * NS_PER_S),
        )
        if span.is_recording():
            record.traced(f"{span.get_span_context().trace_id:032x}")
        return RequestTrace(_context_of(span), self._tracer, span)

    def close(self) -> None:
        """Send what is left. Blocks for up to a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


@dataclass(frozen=True, slots=True)
class SpanPart:
    """A stretch of a request's time, ns since it came in."""

    name: str
    from_ns: int
    to_ns: int
    engine: str | None
    """Who did it, if an engine did."""
    attributes: Mapping[str, str | int | float | bool]


def parts_of(record: RequestRecord) -> list[SpanPart]:
    """Parts of a request's time."""
    end = record.e2e_ns or 0
    decided = min(record.decided_ns if record.decided_ns is not None else end, end)
    found = [SpanPart("decide", 0, decided, None, {})]
    prefilled = decided
    if record.prefill_ns is not None and record.prefill_engine is not None:
        prefilled = min(decided + record.prefill_ns, end)
        engine = {"prfaas.engine": record.prefill_engine}
        found.append(SpanPart("prefill leg", decided, prefilled, record.prefill_engine, engine))
    if record.transfer is not None:
        moved: dict[str, str | int] = {
            "prfaas.transfer.id": record.transfer.transfer_id.hex(),
            "prfaas.transfer.state": record.transfer.state,
            "prfaas.kv.bytes": record.transfer.num_bytes,
            "prfaas.pool.source": record.transfer.source,
            "prfaas.pool.destination": record.transfer.destination,
        }
        landed = decided + record.transfer.duration_ns
        found.append(SpanPart(TRANSFER, decided, landed, None, moved))
    if record.decode_engine is not None and end > prefilled:
        engine = {"prfaas.engine": record.decode_engine}
        found.append(SpanPart("decode leg", prefilled, end, record.decode_engine, engine))
    return found


def _describe(span: Any, record: RequestRecord, model: str) -> None:
    from opentelemetry.trace import StatusCode

    decision = record.decision
    said = {
        "gen_ai.operation.name": _OPERATIONS[record.api],
        "gen_ai.provider.name": "prfaas",
        "gen_ai.request.model": model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.time_to_first_chunk": seconds_of(record.ttft_ns),
        "prfaas.request_id": record.request_id,
        "prfaas.outcome": record.outcome.value,
        "prfaas.path": record.path,
        "prfaas.reason": decision.reason.value if decision else None,
        "prfaas.new_tokens": decision.num_new_tokens if decision else None,
        "prfaas.pull_tokens": decision.pull_tokens if decision else None,
        "prfaas.offload_threshold": decision.offload_threshold if decision else None,
        "prfaas.predicted_ttft_local": seconds_of(decision.predicted_local_ns)
        if decision
        else None,
        "prfaas.predicted_ttft_remote": seconds_of(decision.predicted_remote_ns)
        if decision
        else None,
        "prfaas.fallback": record.fallback.label if record.fallback else None,
    }
    span.set_attributes({name: value for name, value in said.items() if value is not None})
    if record.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        span.set_status(StatusCode.ERROR)


def _context_in(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's W3C context, if it is one."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not is_traceparent(parent):
        return {}
    return {"traceparent": parent} | ({"tracestate": state} if _TRACESTATE.fullmatch(state) else {})


def _context_of(span: Any) -> dict[str, str]:
    """W3C context of whatever happens below a span."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    onward: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(onward, set_span_in_context(span))
    return onward
