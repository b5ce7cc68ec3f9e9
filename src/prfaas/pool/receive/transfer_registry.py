"""Known transfers of a pool: open ones, and recently ended ones.

It identifies late lookups, offers and fragments.
"""

from __future__ import annotations

from collections import OrderedDict

from prfaas.core.transfer.transfer_state import Transfer, TransferEnd


class KnownTransfers:
    """Incoming transfers by id, and refusals by peer and id; the oldest end is forgotten first.

    `get` and `refusal` may be asked on any thread.

    Args:
        transfers_max: Transfers, and refusals, known at once.
    """

    def __init__(self, transfers_max: int) -> None:
        self.transfers_max = transfers_max
        self._known: dict[bytes, Transfer] = {}
        self._open: dict[bytes, Transfer] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        """Ended transfers, the oldest end first."""
        self._refused: OrderedDict[tuple[str, bytes], TransferEnd] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Return True if as many are open as there may be."""
        return self.num_open >= self.transfers_max

    def get(self, transfer_id: bytes) -> Transfer | None:
        """A transfer, open or over; None if it is not known, or not any more."""
        return self._known.get(transfer_id)

    def open(self) -> list[Transfer]:
        """Open transfers, the oldest first."""
        return list(self._open.values())

    def began(self, transfer: Transfer) -> None:
        """Remember a transfer that is open."""
        self._known[transfer.transfer_id] = self._open[transfer.transfer_id] = transfer
        self._ended.pop(transfer.transfer_id, None)
        while len(self._known) > self.transfers_max and self._ended:
            oldest, _ = self._ended.popitem(last=False)
            del self._known[oldest]

    def ended(self, transfer: Transfer) -> None:
        """A transfer is over; called once for each."""
        self._open.pop(transfer.transfer_id, None)
        self._ended[transfer.transfer_id] = None

    def refuse(self, transfer_id: bytes, peer: str, end: TransferEnd) -> None:
        """Remember why a peer's transfer was not taken."""
        self._refused[peer, transfer_id] = end
        while len(self._refused) > self.transfers_max:
            self._refused.popitem(last=False)

    def refusal(self, transfer_id: bytes, peer: str) -> TransferEnd | None:
        """Return the reason for the refusal of a peer's transfer; None if unknown."""
        return self._refused.get((peer, transfer_id))
