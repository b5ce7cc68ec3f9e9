"""Names and tickets of the transfers that both machines are tried with."""

from __future__ import annotations

from typing import Any

from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.shipping import NamedBlocks, manifest_of_keys
from prfaas.core.transfer import events as on
from prfaas.core.transfer.tickets import Ticket
from prfaas.core.transfer.transfer_state import TransferEnd

LAYOUT, BLOCK_BYTES, GRACE_NS, LIFETIME_NS = b"L" * 32, 10, 5, 50
KEYS = [BlockKey(0, bytes([number]) * 32) for number in range(4)]
NAMED = NamedBlocks(manifest_of_keys(KEYS[:3]))
PEERS, IDS = ("near", "far"), [bytes([number]) * 16 for number in range(4)]
ENDS = sorted(set(TransferEnd) - {TransferEnd.COMMITTED})
TRANSFERS_MAX = 3


def granted(peer: str, transfer_id: bytes, **more: Any) -> on.Granted:
    ticket = Ticket(
        transfer_id, "", LAYOUT, peer, "here", b"", 2 * BLOCK_BYTES, 0, quality=Quality.LOSSLESS
    )
    return on.Granted(
        peer, transfer_id, ticket=ticket, named=NAMED, lifetime_ns=LIFETIME_NS, **more
    )
