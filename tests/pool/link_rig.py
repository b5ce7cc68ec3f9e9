"""Two pool nodes with a fault proxy between them, and blocks to push over their link."""

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prfaas.core.kv.blocks import BlockKey
from prfaas.pool.send.data_sender import FRAGMENT_BYTES
from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest
from tests.lab.faults import FaultProxy

from .sites import LAYOUT, NAMED, Site, seal, until

BLOCK_BYTES = 3 * FRAGMENT_BYTES + 17
MEMORY = 64 << 20
SENT = {"direction": "sent", "state": "committed"}
RECEIVED = {"direction": "received", "state": "committed"}


def a_block(number: int) -> tuple[BlockKey, StoredBlock]:
    key, data = BlockKey(0, bytes([number]) * 32), bytearray(secrets.token_bytes(BLOCK_BYTES))
    return key, StoredBlock(data, block_digest(LAYOUT.layout_id, key, data))


@dataclass
class Rig:
    """Two pool nodes with a fault proxy between them."""

    proxy: FaultProxy
    prfaas: Site
    pd: Site
    identities: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def link(self) -> OutboundLink:
        return self.prfaas.node.links["pd-pool"]

    def push(self, transfer: bytes, count: int) -> dict[BlockKey, StoredBlock]:
        blocks = dict(a_block(next(self.numbers)) for _ in range(count))
        for key, block in blocks.items():
            self.link.push(transfer, LAYOUT.layout_id, key, block)
        return blocks

    def begin(self) -> bytes:
        transfer = secrets.token_bytes(16)
        sealed = seal(self.identities, transfer, bytes_max=MEMORY // 2)
        tickets = self.prfaas.node.link_room.tickets
        grant = tickets.to_send(
            sealed,
            NAMED,
            transfer_id=transfer,
            destination="pd-pool",
            layout_id=LAYOUT.layout_id,
        )
        self.link.open(grant)
        return transfer

    async def all_there(self, blocks: dict[BlockKey, StoredBlock]) -> None:
        """Committed at both ends, byte for byte, and nothing is held any more."""
        await until(lambda: self.pd.metric("transfers_total", **RECEIVED) == 1)
        await until(lambda: self.prfaas.metric("transfers_total", **SENT) == 1)
        for key, block in blocks.items():
            stored = self.pd.node.store.get(LAYOUT.layout_id, key)
            assert stored is not None
            assert stored.data == block.data
            assert block.pins == 0
