"""Goodput and busy time of a link: one definition, for pool nodes and for the simulator.

    has nothing to send   has something to send
    ──────────────────────┬───────────────────────────────┬──────────► time
                          │◄─ filling: 2 RTT ─►│◄─ filled ─►│
                          │◄─────────── busy ────────────►│

- **Busy**: bytes wait to be sent. The share of time that a link is busy is its utilisation.
- **Goodput**: bytes acknowledged for each second of filled time, as a mean that forgets with
  `MEMORY_NS` of filled time. A byte counts once, however often it was sent.
- **Filling**: acknowledgements of what is sent first come a round trip later, so the rate of the
  first two round trips is too low. That rate, and that of a link with little to send, is a lower
  bound: it raises the goodput and never lowers it. BBR treats application-limited samples alike
  (draft-ietf-ccwg-bbr, section 5.1.2).
- **Idle**: a link that sends nothing shows nothing; its goodput stays.
- **Stalled**: a link that delivers nothing of what waits may be dead. Connected again, it has the
  goodput of before; otherwise nobody would use it, and nothing would show that it is well.
- **Budget**: what an operator allows limits what is sent, and so the goodput of a filled link.

Raw facts come in with the time as an argument: bytes acknowledged so far, whether bytes wait, the
round trip. Samples may be taken at any times.
"""

from __future__ import annotations

from math import exp

from prfaas.units import NS_PER_S

BITS_PER_BYTE = 8
MEMORY_NS = 175_000_000
"""Filled time in which the weight of older samples falls to 1/e; after half a second it is 6 %."""
FILL_ROUND_TRIPS = 2


class LinkGoodput:
    """Throughput of one direction of a link, from samples of its counters."""

    def __init__(self) -> None:
        self._mean_bits_per_s: float | None = None
        self._before_stall: float | None = None
        """The mean before samples in which nothing was delivered; None without such."""
        self.fresh_bits_per_s = 0.0
        """Rate between the last two samples; 0 unless the link was filled all the time."""
        self.busy_ns = 0
        """Time in which bytes waited to be sent; never falls."""
        self.filled_at_ns: int | None = None
        """Time from which the link counts as busy if bytes keep waiting; None while none wait."""
        self._sampled_at_ns: int | None = None
        self._busy_since_ns: int | None = None
        self._delivered_bytes = 0.0

    def sample(self, now_ns: int, delivered_bytes: float, *, is_busy: bool, rtt_ns: int) -> None:
        """Take the counters in.

        Args:
            now_ns: When; not before the last sample.
            delivered_bytes: Bytes acknowledged so far; after a fall counting restarts.
            is_busy: True if bytes wait to be sent.
        """
        last_ns, self._sampled_at_ns = self._sampled_at_ns, now_ns
        delivered, self._delivered_bytes = delivered_bytes - self._delivered_bytes, delivered_bytes
        self.fresh_bits_per_s = 0.0
        if last_ns is None or delivered < 0:
            self._busy_since_ns = self.filled_at_ns = last_ns = None
        if not is_busy:
            self._busy_since_ns = self.filled_at_ns = None
        else:
            if last_ns is not None:
                self.busy_ns += now_ns - last_ns
            if self._busy_since_ns is None:
                self._busy_since_ns = now_ns
            self.filled_at_ns = self._busy_since_ns + FILL_ROUND_TRIPS * rtt_ns
        if last_ns is not None and now_ns > last_ns:
            is_filled = self.filled_at_ns is not None and last_ns >= self.filled_at_ns
            self._learn(now_ns - last_ns, delivered, is_filled=is_filled)

    def restart(self) -> None:
        """The link is connected anew: what it did not deliver when it broke shows nothing."""
        if self._before_stall is not None:
            self._mean_bits_per_s, self._before_stall = self._before_stall, None
        self._busy_since_ns = self.filled_at_ns = self._sampled_at_ns = None
        self.fresh_bits_per_s = 0.0

    def change_rate(
        self, now_ns: int, delivered_bytes: float, *, is_busy: bool, rtt_ns: int
    ) -> None:
        """The same where the rate is known to have been steady, and from now on is another one.

        The link was busy or idle all the time since the last sample. `is_busy` is from now on.
        """
        last_ns, filled_at_ns = self._sampled_at_ns, self.filled_at_ns
        self.fresh_bits_per_s = 0.0
        if filled_at_ns is not None and last_ns is not None and now_ns > last_ns:
            self.busy_ns += now_ns - last_ns
            before = self._delivered_bytes
            if last_ns < filled_at_ns < now_ns:
                share = (filled_at_ns - last_ns) / (now_ns - last_ns)
                until = before + share * (delivered_bytes - before)
                self._learn(filled_at_ns - last_ns, until - before, is_filled=False)
                last_ns, before = filled_at_ns, until
            is_filled = last_ns >= filled_at_ns
            self._learn(now_ns - last_ns, delivered_bytes - before, is_filled=is_filled)
        self._sampled_at_ns, self._delivered_bytes = now_ns, delivered_bytes
        if not is_busy:
            self._busy_since_ns = self.filled_at_ns = None
        elif filled_at_ns is None:
            self._busy_since_ns = now_ns
            self.filled_at_ns = now_ns + FILL_ROUND_TRIPS * rtt_ns

    @property
    def bits_per_s(self) -> int:
        """Goodput, at least 1; 0 until the link was filled once."""
        return 0 if self._mean_bits_per_s is None else max(1, round(self._mean_bits_per_s))

    def _learn(self, passed_ns: int, delivered_bytes: float, *, is_filled: bool) -> None:
        mean = self._mean_bits_per_s
        bits_per_s = delivered_bytes * BITS_PER_BYTE * NS_PER_S / passed_ns
        if bits_per_s:
            self._before_stall = None
        elif is_filled and self._before_stall is None:
            self._before_stall = mean
        if is_filled:
            self.fresh_bits_per_s = bits_per_s
            if mean is None:
                self._mean_bits_per_s = bits_per_s
                return
        elif mean is None or bits_per_s <= mean:
            return
        self._mean_bits_per_s = mean + (1 - exp(-passed_ns / MEMORY_NS)) * (bits_per_s - mean)
