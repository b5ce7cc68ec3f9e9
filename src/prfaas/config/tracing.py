"""The `[tracing]` table of a deployment file."""

from __future__ import annotations

from pydantic import Field

from prfaas.config.table import Table

COLLECTOR = r"^https?://[^\s]+$"


class TracingTable(Table):
    """`[tracing]`: OpenTelemetry spans of requests, and of their transfers in pool nodes."""

    endpoint: str = Field(pattern=COLLECTOR)
    """Collector with OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces", for the gateway and
    the pool nodes of `prfaas up`; other pool nodes have `--tracing`."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of traced requests; the sampling decision of a client has precedence."""
