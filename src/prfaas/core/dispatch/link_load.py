"""State of a link, from what was promised to it and what its pool node reports.

| signal | from | while the report is late or missing |
|---|---|---|
| rate | goodput; until one is measured the operator's budget, else the plan | stays |
| backlog | promised bytes, less those that the report says have arrived | as of the last report |
| utilisation | busy share of the time between two reports | 0 when that is too old |
| mean utilisation | its mean, forgotten with `MEMORY_NS` | decays while nothing is promised |

A link to which nothing is promised is known: it has no backlog, and its rate stays. A link with
promised bytes is unknown when its last report, and the last instant without any, are too old. How
goodput and busy time are counted is in `core/transfer/link_goodput.py`.
"""

from __future__ import annotations

from math import exp

from prfaas.core.routing.predictions import LinkState
from prfaas.records import Record
from prfaas.units import NS_PER_S

MEMORY_NS = 25 * NS_PER_S
"""Time in which the weight of older intervals in the mean utilisation falls to 1/e."""


class LinkReport(Record, frozen=True):
    """Counters of a link at its sending pool node.

    Attributes:
        observed_at_ns: When they were read.
        goodput_bits_per_s: 0 until the link was filled once, or if its part of a site's budget
            held it below the rate that it would have now.
        sent_bytes: Bytes that have arrived of transfers that are open.
        busy_ns: Time in which bytes waited to be sent, since the pool node was started.
        budget_bits_per_s: The most that the operator lets the link carry; 0 is no limit. Of an
            idle link with a part of a site's budget, what it would be with something to send.
    """

    observed_at_ns: int
    goodput_bits_per_s: float
    sent_bytes: int
    busy_ns: int = 0
    rtt_ns: int = 0
    budget_bits_per_s: float = 0.0


class LinkBook:
    """One direction of a link, as a gateway knows it.

    Args:
        stale_after_ns: Age beyond which a report counts as unknown.
        expected_bits_per_s: Rate by the plan, until the first one is measured; 0 is unknown.
    """

    def __init__(self, stale_after_ns: int, expected_bits_per_s: float = 0.0) -> None:
        self._stale_after_ns, self._expected_bits_per_s = stale_after_ns, expected_bits_per_s
        self._report: LinkReport | None = None
        self._sent_bytes = self._promised_bytes = self._idle_until_ns = 0
        self._utilisation = self._mean_utilisation = 0.0
        self.bits_per_s = expected_bits_per_s
        """The last rate, however old; 0 is unknown."""
        self.num_open = 0
        """Transfers that were decided and have not ended."""

    def promise(self, num_bytes: int, now_ns: int) -> None:
        """A transfer of `num_bytes` was decided."""
        if not self._promised_bytes:
            self._idle_until_ns, self._sent_bytes = now_ns, 0
        self._promised_bytes += num_bytes
        self.num_open += num_bytes > 0

    def settle(self, num_bytes: int) -> None:
        """A transfer of `num_bytes` has landed or was aborted."""
        self._promised_bytes -= num_bytes
        self.num_open -= num_bytes > 0

    def report(self, report: LinkReport) -> None:
        """Take a report in; older ones than the last are ignored."""
        before = self._report
        if before is not None and report.observed_at_ns < before.observed_at_ns:
            return
        self._report, self._sent_bytes = report, report.sent_bytes
        rate = report.goodput_bits_per_s or report.budget_bits_per_s
        self.bits_per_s = rate or self._expected_bits_per_s
        if before is None:
            return
        passed_ns = report.observed_at_ns - before.observed_at_ns
        busy_ns = report.busy_ns - before.busy_ns
        if passed_ns > 0 and busy_ns >= 0:
            self._utilisation = use = min(1.0, busy_ns / passed_ns)
            self._mean_utilisation += (1 - exp(-passed_ns / MEMORY_NS)) * (
                use - self._mean_utilisation
            )

    def latest(self, now_ns: int) -> LinkState | None:
        """Return what is known of the link now; None if that is too old, or no rate is known."""
        rate, seen, promised = self.bits_per_s, self._report, self._promised_bytes
        if not rate:
            return None
        seen_at_ns = self._idle_until_ns if seen is None else seen.observed_at_ns
        is_fresh = now_ns - seen_at_ns <= self._stale_after_ns
        if promised and not is_fresh and now_ns - self._idle_until_ns > self._stale_after_ns:
            return None
        backlog, rtt_ns = promised - self._sent_bytes, 0 if seen is None else seen.rtt_ns
        use = self._utilisation if is_fresh else 0.0
        return LinkState(rate, backlog if backlog > 0 else 0, rtt_ns, use)

    def mean_utilisation(self, now_ns: int) -> float:
        """Share of the time lately in which the link was busy, in [0, 1]."""
        if self._report is None:
            return 0.0
        idle_until_ns = self._idle_until_ns if self._promised_bytes else now_ns
        idle_ns = max(0, idle_until_ns - self._report.observed_at_ns)
        return self._mean_utilisation * exp(-idle_ns / MEMORY_NS)

    @property
    def rtt_ns(self) -> int:
        """The last round trip, however old; 0 is unknown."""
        return 0 if self._report is None else self._report.rtt_ns

    @property
    def promised_bytes(self) -> int:
        """Bytes of transfers that have not ended; 0 when all is over."""
        return self._promised_bytes
