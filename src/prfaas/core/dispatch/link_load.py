"""What is known of a link: what was promised to it, and what it was seen to carry."""

from __future__ import annotations

from typing import NamedTuple

_WEIGHT = 0.02
"""Weight of the newest report in the mean utilisation."""


class LinkReport(NamedTuple):
    """What a pool node saw of a link.

    Attributes:
        observed_at_ns: When.
        bits_per_s: What the link carries.
        sent_bytes: Bytes that open transfers have sent already.
        utilisation: Share of the capacity used since the report before, in [0, 1].
        rtt_ns: Round-trip time.
    """

    observed_at_ns: int
    bits_per_s: float
    sent_bytes: int
    utilisation: float
    rtt_ns: int = 0


class LinkBook:
    """A link as the gateway sees it.

    The gateway knows what it promised and what has landed; the rate comes in late reports.

    Args:
        stale_after_ns: Age beyond which a report counts as unknown.
    """

    def __init__(self, stale_after_ns: int) -> None:
        self._stale_after_ns = stale_after_ns
        self._report: LinkReport | None = None
        self._promised_bytes = 0
        self.utilisation = 0.0
        """Mean share of the capacity that was used lately."""
        self.num_open = 0
        """Transfers that were decided and have not ended."""

    def promise(self, num_bytes: int) -> None:
        """A transfer of `num_bytes` was decided."""
        self._promised_bytes += num_bytes
        self.num_open += num_bytes > 0

    def settle(self, num_bytes: int) -> None:
        """A transfer of `num_bytes` has landed or was given up."""
        self._promised_bytes -= num_bytes
        self.num_open -= num_bytes > 0

    def report(self, report: LinkReport) -> None:
        """Take a report; older ones than the last are ignored."""
        if self._report is None or report.observed_at_ns >= self._report.observed_at_ns:
            self._report = report
            self.utilisation += _WEIGHT * (report.utilisation - self.utilisation)

    def latest(self, now_ns: int) -> LinkReport | None:
        """The last report while it is fresh."""
        seen = self._report
        fresh = seen is not None and now_ns - seen.observed_at_ns <= self._stale_after_ns
        return seen if fresh else None

    @property
    def last(self) -> LinkReport | None:
        """The last report, however old."""
        return self._report

    def backlog_bytes(self, now_ns: int) -> int | None:
        """Bytes promised and not sent yet; None without a fresh report."""
        seen = self.latest(now_ns)
        return None if seen is None else self.behind(seen)

    def behind(self, seen: LinkReport) -> int:
        """Bytes promised and not sent yet, as of a report."""
        behind = self._promised_bytes - seen.sent_bytes
        return behind if behind > 0 else 0

    @property
    def promised_bytes(self) -> int:
        """Bytes of transfers that have not ended; 0 when all is over."""
        return self._promised_bytes
