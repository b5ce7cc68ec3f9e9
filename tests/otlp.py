"""A collector of OpenTelemetry spans: OTLP over HTTP, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.senders: dict[bytes, tuple[object, object]] = {}
        """Service and its instance, by span id."""
        self.raw = b""

    async def take(self, request: web.Request) -> web.Response:
        data = await request.read()
        self.raw += data
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            who = values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += scope.spans
                for span in scope.spans:
                    self.senders[span.span_id] = who["service.name"], who["service.instance.id"]
        return web.Response()

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield made, f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    await runner.cleanup()


def attributes(span: Span) -> dict[str, object]:
    """Attributes of a span."""
    return values(list(span.attributes))


def values(pairs: list[KeyValue]) -> dict[str, object]:
    """Attributes as Python has them."""
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind) if kind else None
    return found
