"""The `[tracing]` table of a deployment file."""

from __future__ import annotations

from pydantic import Field

from prfaas.config.table import Table

COLLECTOR = r"^https?://[^\s]+$"


class TracingTable(Table):
    """`[tracing]`: OpenTelemetry spans of requests."""

    endpoint: str = Field(pattern=COLLECTOR)
    """Where a collector takes OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces"."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced; a client's own choice comes first."""
