"""Two pool nodes whose link codes blocks, and a model with blocks to code."""

import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout, Plane
from prfaas.pool.send.data_sender import FRAGMENT_BYTES
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.wire.fragments import block_digest
from tests.lab.faults import FaultProxy

from .bfloat16_numbers import normal
from .sites import LAYOUT, NAMED, Site, seal, until

BLOCK_BYTES = 5 * FRAGMENT_BYTES + 10
"""The last fragment of a block is an odd one."""
STATE_BYTES = 3 * FRAGMENT_BYTES + 1
MEMORY = 64 << 20
Pairs = Callable[[LinkCodec, LinkCodec], Awaitable["Pair"]]
MODEL = Layout(
    LAYOUT.layout_id,
    16,
    "0",
    (
        CacheGroup(
            0, GroupKind.FULL_ATTENTION, 16, BLOCK_BYTES, planes=(Plane("bfloat16", BLOCK_BYTES),)
        ),
        CacheGroup(
            1, GroupKind.LINEAR_STATE, 64, STATE_BYTES, planes=(Plane("float32", STATE_BYTES),)
        ),
    ),
)


def a_block(number: int, group: int = 0, data: bytes | None = None) -> tuple[BlockKey, StoredBlock]:
    key = BlockKey(group, bytes([number]) * 32)
    if data is None:
        data = normal(BLOCK_BYTES // 2, seed=number) if group == 0 else b"s" * STATE_BYTES
    return key, StoredBlock(bytearray(data), block_digest(LAYOUT.layout_id, key, data))


@dataclass
class Pair:
    """Two pool nodes, and a proxy for faults between them."""

    proxy: FaultProxy
    prfaas: Site
    pd: Site
    identities: Path
    numbers: Any = field(default_factory=itertools.count)

    async def move(self, blocks: list[tuple[BlockKey, StoredBlock]]) -> None:
        """Send blocks and see that each arrives bit by bit."""
        await self.send(blocks)
        for key, block in blocks:
            assert self.arrived(key) == bytes(block.data)

    async def send(
        self, blocks: list[tuple[BlockKey, StoredBlock]], quality: Quality = Quality.LOSSLESS
    ) -> None:
        """Send blocks of a class, and wait until they are committed."""
        transfer, link = secrets.token_bytes(16), self.prfaas.node.links["pd-pool"]
        committed = self.pd.metric("transfers_total", direction="received", state="committed")
        self.begin(transfer, quality)
        for key, block in blocks:
            link.push(transfer, LAYOUT.layout_id, key, block)
        link.finish(transfer)
        await until(
            lambda: (
                self.pd.metric("transfers_total", direction="received", state="committed")
                > committed
            )
        )
        await until(lambda: not link.num_open)

    def arrived(self, key: BlockKey) -> bytes:
        """Return the bytes of a block at the receiver."""
        stored = self.pd.node.store.get(LAYOUT.layout_id, key)
        assert stored is not None
        return bytes(stored.data)

    def begin(self, transfer: bytes, quality: Quality = Quality.LOSSLESS) -> None:
        sealed = seal(self.identities, transfer, bytes_max=MEMORY // 2, quality=quality)
        grant = self.prfaas.node.link_room.tickets.to_send(
            sealed,
            NAMED,
            transfer_id=transfer,
            destination="pd-pool",
            layout_id=LAYOUT.layout_id,
        )
        self.prfaas.node.links["pd-pool"].open(grant)

    @property
    def is_agreed(self) -> bool:
        return self.prfaas.node.links["pd-pool"].coding._is_agreed

    def moved(self) -> tuple[float, float]:
        """Bytes of blocks, and bytes as they travelled, as both ends count them."""
        figures = [
            (
                site.metric("link_bytes_total", peer=peer, direction=way),
                site.metric("link_wire_bytes_total", peer=peer, direction=way),
            )
            for site, peer, way in (
                (self.prfaas, "pd-pool", "sent"),
                (self.pd, "prfaas-pool", "received"),
            )
        ]
        assert figures[0] == figures[1]
        return figures[0]
