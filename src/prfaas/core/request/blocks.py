"""Blocks that a request waits for, as the pools report them."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.transfers import TransferEnd

POOL_DOWN = "pool_down"
"""A pool is not heard any more."""
TIMEOUT = "timeout"
"""No pool reported an end."""
UNKNOWN = "unknown"
"""Blocks are missing though their transfer ended well."""


@dataclass(slots=True)
class Movement:
    """Blocks on their way between two pools, or within one.

    Attributes:
        source: Pool that sends.
        destination: Pool that receives.
        num_tokens: Prefix that is at the destination once all have arrived.
        is_open: They are neither aborted nor released.
        end: What the destination reported; None before.
        fault: Why they can not arrive any more, the destination's word before the source's; empty
            while they can.
    """

    source: str
    destination: str
    num_tokens: int
    is_open: bool = True
    end: TransferEnd | None = None
    fault: str = ""

    @property
    def link(self) -> tuple[str, str]:
        """Both ends of their way."""
        return self.source, self.destination

    @property
    def crosses_link(self) -> bool:
        """True if they leave their pool; of others no pool reports an end."""
        return self.source != self.destination

    def ended(self, kind: TransferEnd, *, at_destination: bool) -> None:
        """Note a pool's report."""
        if at_destination:
            self.end = self.end or kind
        if kind is not TransferEnd.COMMITTED and (at_destination or not self.fault):
            self.fault = kind

    @property
    def failure(self) -> str:
        """Why blocks are missing: one of a bounded set."""
        if self.fault:
            return self.fault
        return UNKNOWN if self.end is not None or not self.crosses_link else TIMEOUT
