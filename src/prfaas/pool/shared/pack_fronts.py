"""Reading of the indexes of packs; those that cannot be read are skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prfaas.core.kv.blocks import BlockName
from prfaas.log_throttle import LogThrottle
from prfaas.pool.keys.sealing import AlteredError, UnknownKeyError
from prfaas.pool.keys.site_keys import KeyRing
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.packs import PackedBlock, PackName, read_front
from prfaas.pool.shared.settings import S3Timing
from prfaas.pool.shared.tier_keys import TierKeys
from prfaas.units import NS_PER_S

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Altered bytes are read once more: the answer may be altered, and not the object."""


class PackFronts:
    """Reader of the fronts of packs.

    Args:
        tenants: Keys of tenants; a block whose key is gone is not shown.
        pool: Name of this pool node.
        timing: How long a request may take, and an altered pack is skipped.
    """

    def __init__(
        self,
        bucket: Bucket,
        keys: KeyRing,
        tenants: TierKeys,
        pool: str,
        timing: S3Timing,
        metrics: PoolMetrics,
        clock_ns: Callable[[], int],
    ) -> None:
        self._bucket, self._keys, self._pool = bucket, keys, pool
        self._tenants = tenants
        self._timing, self._metrics, self._clock_ns = timing, metrics, clock_ns
        self._skipped: dict[PackName, int | None] = {}
        """Time at which an unreadable pack is read again; None for one with an unknown key."""
        self._said = LogThrottle(clock_ns)

    @property
    def skipped(self) -> frozenset[PackName]:
        """Packs that cannot be read at present."""
        now_ns = self._clock_ns()
        over = [name for name, until in self._skipped.items() if until and until <= now_ns]
        for name in over:
            del self._skipped[name]
        return frozenset(self._skipped)

    def forget(self, name: PackName) -> None:
        """A pack is gone."""
        self._skipped.pop(name, None)

    async def read(self, name: PackName) -> dict[BlockName, PackedBlock] | None:
        """The blocks of a pack; None if it is gone or unreadable.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        problem = AlteredError("not read")
        for _ in range(ATTEMPTS):
            try:
                front = await self._bucket.read(
                    name.path, 0, name.front_bytes, self._timing.request_s
                )
                return await self._readable(read_front(name, front, self._keys, self._pool))
            except GoneError:
                return None
            except UnknownKeyError as error:
                self._skip(name, None, "unknown_key", f"{error}, which is not in the file of keys")
                return None
            except AlteredError as error:
                problem = error
        until_ns = self._clock_ns() + int(self._timing.reread_s * NS_PER_S)
        self._skip(name, until_ns, "altered", str(problem))
        return None

    async def _readable(self, blocks: dict[BlockName, PackedBlock]) -> dict[BlockName, PackedBlock]:
        refs = {block.ref for block in blocks.values()}
        lost = {ref for ref in refs if await self._tenants.get(ref) is None}
        return {name: block for name, block in blocks.items() if block.ref not in lost}

    def _skip(self, name: PackName, until_ns: int | None, reason: str, why: str) -> None:
        self._skipped[name] = until_ns
        self._metrics.shared_unreadable.labels(reason=reason).inc()
        if self._said.is_new(reason):
            log.error("shared tier: a pack is skipped: %s", why)
