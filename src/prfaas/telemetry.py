"""OpenTelemetry spans: where a process sends them, and the W3C context that ties them together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prfaas.extras import require

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5.0
TRACEPARENT = r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"
"""W3C context: version, trace, span, flags."""
TRACEPARENT_CHARS = 55
_TRACEPARENT = re.compile(TRACEPARENT)
_SAMPLED = 1


def is_traceparent(text: str) -> bool:
    """Return True if a text is W3C context."""
    return _TRACEPARENT.fullmatch(text) is not None


def is_sampled(traceparent: str) -> bool:
    """Return True if the trace of a W3C context is sampled."""
    return is_traceparent(traceparent) and bool(int(traceparent[-2:], 16) & _SAMPLED)


def make_provider(
    endpoint: str, service: str, instance: str, sample_ratio: float = 1.0
) -> TracerProvider:
    """Sends spans to a collector, from a thread of its own; what that has no room for is dropped.

    Args:
        endpoint: Takes OTLP over HTTP.
        service: What kind of process this is.
        sample_ratio: Share of traces that are recorded when they begin here.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    require("tracing", "tracing")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(sample_ratio),
        resource=Resource.create({"service.name": service, "service.instance.id": instance}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
