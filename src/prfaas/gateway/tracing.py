"""OpenTelemetry spans of requests: one for the whole, one for each leg, one for the transfer.

The span of the whole begins with the request, so that engines hang their own spans under it by the
W3C context in both legs' headers; those below it are made when the request is over, from what was
noted about it. Names follow the `gen_ai` conventions. No prompt, answer or key is in any of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prfaas.config.tracing import TracingTable
from prfaas.gateway.records import Outcome, Record
from prfaas.units import NS_PER_S

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5.0
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}


@dataclass(slots=True)
class Trace:
    """One request's place in a trace.

    Attributes:
        headers: W3C context for both legs.
        tracer: Makes the spans below; None where nothing is recorded.
        span: Of the whole request.
    """

    headers: Mapping[str, str]
    tracer: Any = None
    span: Any = None

    def end(self, record: Record, model: str) -> None:
        """The request is over."""
        if self.span is None:
            return
        began_ns = round(record.started_unix_s * NS_PER_S)
        if self.span.is_recording():
            _describe(self.span, record, model)
            for part in parts_of(record):
                self._below(part, began_ns)
        self.span.end(end_time=began_ns + (record.e2e_ns or 0))

    def _below(self, part: Part, began_ns: int) -> None:
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
        service: Name of this gateway.
    """

    def __init__(self, table: TracingTable | None, service: str) -> None:
        self._provider = None if table is None else _provider(table, service)
        self._tracer = self._provider.get_tracer("prfaas") if self._provider else None

    def begin(self, record: Record, headers: Mapping[str, str], model: str) -> Trace:
        """A request came in.

        Args:
            record: The request.
            headers: The client's.
            model: What is served.
        """
        context = _context_in(headers)
        if self._tracer is None:
            return Trace(context)
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        span = self._tracer.start_span(
            f"{_OPERATIONS[record.api]} {model}",
            context=propagator.extract(context),
            kind=SpanKind.SERVER,
            start_time=round(record.started_unix_s * NS_PER_S),
        )
        onward: dict[str, str] = {}
        propagator.inject(onward, set_span_in_context(span))
        return Trace(onward, self._tracer, span)

    def close(self) -> None:
        """Send what is left. Blocks for up to a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a request's time, ns since it came in.

    Attributes:
        name: What happened.
        from_ns: When it began.
        to_ns: When it ended.
        engine: Who did it, if an engine did.
        attributes: Of its span.
    """

    name: str
    from_ns: int
    to_ns: int
    engine: str | None
    attributes: Mapping[str, str | int | float | bool]


def parts_of(record: Record) -> list[Part]:
    """Where a request's time went."""
    end = record.e2e_ns or 0
    decided = min(record.decided_ns if record.decided_ns is not None else end, end)
    found = [Part("decide", 0, decided, None, {})]
    prefilled = decided
    if record.prefill_ns is not None and record.prefill_engine is not None:
        prefilled = min(decided + record.prefill_ns, end)
        engine = {"prfaas.engine": record.prefill_engine}
        found.append(Part("prefill leg", decided, prefilled, record.prefill_engine, engine))
    if record.transfer is not None:
        moved: dict[str, str | int] = {
            "prfaas.transfer.id": record.transfer.transfer_id.hex(),
            "prfaas.transfer.state": record.transfer.state,
            "prfaas.kv.bytes": record.transfer.num_bytes,
            "prfaas.pool.source": record.transfer.source,
            "prfaas.pool.destination": record.transfer.destination,
        }
        landed = decided + record.transfer.duration_ns
        found.append(Part("kv transfer", decided, landed, None, moved))
    if record.decode_engine is not None and end > prefilled:
        engine = {"prfaas.engine": record.decode_engine}
        found.append(Part("decode leg", prefilled, end, record.decode_engine, engine))
    return found


def _describe(span: Any, record: Record, model: str) -> None:
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
        "gen_ai.response.time_to_first_chunk": _seconds(record.ttft_ns),
        "prfaas.request_id": record.request_id,
        "prfaas.outcome": record.outcome.value,
        "prfaas.path": record.path,
        "prfaas.reason": decision.reason.value if decision else None,
        "prfaas.new_tokens": decision.num_new_tokens if decision else None,
        "prfaas.offload_threshold": decision.offload_threshold if decision else None,
        "prfaas.predicted_ttft_local": _seconds(decision.predicted_local_ns) if decision else None,
        "prfaas.predicted_ttft_remote": _seconds(decision.predicted_remote_ns)
        if decision
        else None,
        "prfaas.fallback": f"{record.fallback.stage}/{record.fallback.reason}"
        if record.fallback
        else None,
    }
    span.set_attributes({name: value for name, value in said.items() if value is not None})
    if record.outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        span.set_status(StatusCode.ERROR)


def _context_in(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's W3C context, if it is one."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    return {"traceparent": parent} | ({"tracestate": state} if _TRACESTATE.fullmatch(state) else {})


def _provider(table: TracingTable, service: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(table.sample_ratio),
        resource=Resource.create(
            {"service.name": "prfaas-gateway", "service.instance.id": service}
        ),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=table.endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _seconds(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else duration_ns / NS_PER_S
