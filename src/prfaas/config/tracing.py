"""The `[tracing]` table of a deployment file."""

from __future__ import annotations

from pydantic import Field

from prfaas.config.table import Table

COLLECTOR = r"^https?://[^\s]+$"


class TracingTable(Table):
    """`[tracing]`: OpenTelemetry spans of requests, and of their transfers in pool nodes."""

    endpoint: str = Field(pattern=COLLECTOR)
    """Where a collector takes OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces". The
    gateway sends there, and so do pool nodes that `prfaas up` starts; others have `--tracing`."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are traced; a client's own choice comes first."""
