"""A transfer as a test wants it."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.wire.messages.gateway import TransferEnded


@dataclass
class View:
    """A transfer; without an end it is open until it is stopped."""

    end: TransferEnd | None = TransferEnd.COMMITTED
    num_bytes: int = 10**6
    source: str = "prfaas-pool"
    transfer_id: bytes = b"\1" * 16
    destination: str = "pd-pool"
    is_given_up: bool = False

    @property
    def arrival(self) -> TransferEnded | None:
        if self.end is None:
            return None
        return TransferEnded(
            seq=1,
            transfer_id=self.transfer_id,
            direction="received",
            peer=self.source,
            kind=self.end,
            reason="",
            num_blocks=1,
            num_bytes=self.num_bytes,
            duration_ns=1,
            last_block_age_ns=1,
        )
