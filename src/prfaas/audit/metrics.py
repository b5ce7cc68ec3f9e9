"""Metrics of the audit log of a process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from prfaas.series import Families


class AuditMetrics:
    """Counters and gauges; all 0 without a log.

    Args:
        prefix: Of the names, by the kind of process.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        make = Families(registry)
        self.last_line = make.gauge(
            f"{prefix}_audit_last_line",
            "Number of the last line of the audit log: `prfaas audit verify --expect-lines` "
            "compares a log with it.",
        )
        self.signed_line = make.gauge(
            f"{prefix}_audit_signed_line", "Number of the line of its last checkpoint."
        )
        self.failing = make.gauge(
            f"{prefix}_audit_failing", "1 while the audit log cannot be written."
        )
        self.lost = make.counter(f"{prefix}_audit_lost_records", "Records that were not written.")
        self.writes = make.counter(
            f"{prefix}_audit_writes", "Write calls, one for a batch of lines."
        )
        self.cpu_seconds = make.counter(
            f"{prefix}_audit_cpu_seconds", "CPU time of the thread that writes the audit log."
        )
