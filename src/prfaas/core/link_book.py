"""What is known of a link: what was promised to it, and what it was seen to carry."""

from __future__ import annotations


class LinkBook:
    """A link as the gateway sees it.

    The gateway knows what it promised and what has landed; the rate comes in late reports.

    Args:
        stale_after_ns: Age beyond which a report counts as unknown.
    """

    def __init__(self, stale_after_ns: int) -> None:
        self._stale_after_ns = stale_after_ns
        self._observed_at_ns: int | None = None
        self._bits_per_s = 0.0
        self._utilisation = 0.0
        self._sent_bytes = 0
        self._promised_bytes = 0

    def promise(self, num_bytes: int) -> None:
        """A transfer of `num_bytes` was decided."""
        self._promised_bytes += num_bytes

    def settle(self, num_bytes: int) -> None:
        """A transfer of `num_bytes` has landed or was given up."""
        self._promised_bytes -= num_bytes

    def report(
        self, observed_at_ns: int, bits_per_s: float, sent_bytes: int, utilisation: float
    ) -> None:
        """What a pool node saw; older reports are ignored.

        Args:
            observed_at_ns: When.
            bits_per_s: What the link carries now.
            sent_bytes: Bytes that open transfers have sent already.
            utilisation: Share of the capacity used since the report before.
        """
        if self._observed_at_ns is None or observed_at_ns >= self._observed_at_ns:
            self._observed_at_ns, self._bits_per_s = observed_at_ns, bits_per_s
            self._sent_bytes, self._utilisation = sent_bytes, utilisation

    def is_known(self, now_ns: int) -> bool:
        """Whether there is a report, and it is fresh."""
        seen = self._observed_at_ns
        return seen is not None and now_ns - seen <= self._stale_after_ns

    def backlog_bytes(self, now_ns: int) -> int | None:
        """Bytes promised and not sent yet; None without a fresh report."""
        if not self.is_known(now_ns):
            return None
        return max(0, self._promised_bytes - self._sent_bytes)

    def bits_per_s(self, now_ns: int) -> float | None:
        """What the link carries; None without a fresh report."""
        return self._bits_per_s if self.is_known(now_ns) else None

    def utilisation(self, now_ns: int) -> float | None:
        """Share of the capacity in use, in [0, 1]; None without a fresh report."""
        return self._utilisation if self.is_known(now_ns) else None

    @property
    def promised_bytes(self) -> int:
        """Bytes of transfers that have not ended; 0 when all is over."""
        return self._promised_bytes
