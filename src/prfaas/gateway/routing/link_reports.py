"""What is measured of links, in the dispatcher's words."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.link_load import LinkReport
from prfaas.wire.messages.gateway import LinkTelemetry


class LinkReports:
    """Tells the dispatcher what links carry.

    Args:
        dispatcher: Is told.
        planned_bits_per_s: What the operator's plan says, by source pool; 0 is unknown.
    """

    def __init__(self, dispatcher: Dispatcher, planned_bits_per_s: Mapping[str, float]) -> None:
        self._dispatcher, self._planned_bits_per_s = dispatcher, planned_bits_per_s

    def seen(
        self, source: str, destination: str, measured: LinkTelemetry | None, now_ns: int
    ) -> None:
        """A pool node told what it measures of a link that is up."""
        if measured is None or not measured.goodput_bits_per_s:
            self.idle(source, destination, measured, now_ns)
            return
        report = LinkReport(
            now_ns - measured.age_ns,
            float(measured.goodput_bits_per_s),
            measured.open_arrived_bytes,
            1.0 if measured.queued_bytes else 0.0,  # Where something waits it is in full use.
            measured.rtt_ns,
        )
        self._dispatcher.report_link(source, destination, report)

    def idle(
        self, source: str, destination: str, measured: LinkTelemetry | None, now_ns: int
    ) -> None:
        """A link carries nothing: its last rate holds, else the operator's budget or plan."""
        known = (measured.goodput_bits_per_s or measured.budget_bits_per_s) if measured else 0
        rate = known or self._planned_bits_per_s[source]
        if rate:
            rtt_ns = measured.rtt_ns if measured else 0
            report = LinkReport(now_ns, float(rate), 0, 0.0, rtt_ns)
            self._dispatcher.report_link(source, destination, report)
