"""Writing of packs: blocks are sealed on a thread, and uploaded in the background.

All that waits counts towards one limit: blocks that are not sealed yet (which are pinned in
memory), packs that are being filled, and packs on their way. What comes beyond it is dropped and
counted, so a slow bucket costs no engine anything.
"""

from __future__ import annotations

import asyncio
import logging
import time

from prfaas.core.kv.blocks import BlockKey
from prfaas.errors import TransferError
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.keys.tenant_keys import TenantKey
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket
from prfaas.pool.shared.following import BucketFollower
from prfaas.pool.shared.packs import BLOCKS_MAX, PackBuilder, read_front
from prfaas.pool.shared.settings import S3Settings
from prfaas.pool.shared.tier_keys import TierKeys
from prfaas.pool.shared.write_queue import BlockToWrite, SealingWriter
from prfaas.pool.store.tier_ports import StoredBlock

log = logging.getLogger(__name__)

PACKS_HELD = 4
"""Memory for writing, in packs."""
LAYOUTS_MAX = 16
"""Layouts with a pack that is being filled."""


class PackWriter(SealingWriter):
    """Fills and uploads packs.

    Args:
        settings: Size of a pack, and times.
        contents: Is told of every pack in the bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        keys: KeyRing,
        tenants: TierKeys,
        settings: S3Settings,
        contents: BucketFollower,
        metrics: PoolMetrics,
    ) -> None:
        self._pack_bytes, self._timing = settings.pack_bytes, settings.timing
        super().__init__(PACKS_HELD * self._pack_bytes, metrics, "prfaas-shared-writer")
        self._bucket, self._keys, self._tenants = bucket, keys, tenants
        self._contents, self._writer = contents, contents.packs.pool
        self._open: dict[bytes, PackBuilder] = {}
        """Packs that are being filled, by layout."""

    async def _seal(self, offer: BlockToWrite) -> None:
        layout_id, key = offer.name
        tenant = offer.block.origin.tenant
        try:
            of = await self._tenants.sealing(tenant)
        except asyncio.CancelledError:
            self._offers.appendleft(offer)
            raise
        except TransferError as error:
            self._forget([offer.name], len(offer.block.data))
            offer.done()
            # Or each of them would wait for the same key.
            num_blocks = 1 + self._drop_queued(lambda origin: origin.tenant == tenant)
            self._failed(num_blocks)
            log.error(
                "shared tier: %d blocks were not written: their tenant's key: %s", num_blocks, error
            )
            return
        pack = self._open.get(layout_id)
        if pack is None:
            if len(self._open) >= LAYOUTS_MAX:
                self._finish(next(iter(self._open.values())))
            pack = PackBuilder(self._keys.sealing, layout_id)
            self._open[layout_id] = pack
            asyncio.get_running_loop().call_later(self._timing.flush_s, self._finish, pack)
        block = offer.block
        # As for the disk: an executor holds its arguments too long, so they are lent.
        lent = [(pack, key, block, of)]
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, _add_lent, lent)
        except asyncio.CancelledError:
            if lent:
                lent.clear()
                self._offers.appendleft(offer)  # For the last flush.
            raise
        offer.done()
        if pack.num_bytes >= self._pack_bytes or len(pack.names) >= BLOCKS_MAX:
            self._finish(pack)

    def _finish_all(self) -> None:
        for pack in list(self._open.values()):
            self._finish(pack)

    def _finish(self, pack: PackBuilder) -> None:
        """Upload a pack, unless that has begun."""
        if self._open.get(pack.layout_id) is not pack:
            return
        del self._open[pack.layout_id]
        self._begin(self._write(pack))

    async def _write(self, pack: PackBuilder) -> None:
        try:
            name, data = await asyncio.get_running_loop().run_in_executor(
                self._thread, pack.finish, self._writer, time.time_ns() // 10**6
            )
            self._breaker.began(time.monotonic_ns())
            await self._bucket.write(name.path, data, self._timing.write_s)
        except TransferError as error:
            self._failed(len(pack.names))
            log.error("shared tier: %d blocks were not written: %s", len(pack.names), error)
        else:
            self._wrote(len(data))
            front = data[: name.front_bytes]
            blocks = read_front(name, front, self._keys, self._writer)
            self._contents.written(name, blocks, len(data))
        finally:
            self._forget(pack.names, pack.num_bytes)


def _add_lent(lent: list[tuple[PackBuilder, BlockKey, StoredBlock, TenantKey]]) -> None:
    pack, key, block, of = lent.pop()
    pack.add(key, block.data, block.digest, block.origin, of)
