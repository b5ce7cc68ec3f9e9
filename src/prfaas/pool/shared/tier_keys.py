"""Keys of tenants in a bucket that the pool nodes of a site share.

    PREFIX/keys/TENANT/ID    one wrapped key: made_s u64, then the key, wrapped by the site's key

TENANT is the tag of the tenant, or `none`. The pool node that first writes a block of a tenant
makes its key; the others find it in the bucket. Two nodes that do so at once make two keys, which
is harmless: every block names its key. To purge a tenant its keys are deleted, and all pool nodes
forget them: what is sealed with them is lost, also in objects that stay.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator

from prfaas.errors import TransferError
from prfaas.pool.keys.sealing import AlteredError, UnknownKeyError
from prfaas.pool.keys.tenant_keys import KEY_BYTES, NO_TENANT, TenantKey, new_key
from prfaas.pool.keys.wrapping import KeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.shared.bucket import Bucket, GoneError
from prfaas.pool.shared.purge_marks import PurgeMarks

FOLDER = "keys"
OBJECT_BYTES_MAX = 4096
KNOWN_MAX = 4096
"""Keys that a node keeps in memory."""
ATTEMPTS = 3
"""Attempts to have a key for sealing, while purges of its tenant come in between."""
_PATH = re.compile(rf"{FOLDER}/(none|[0-9a-f]{{32}})/([0-9a-f]{{32}})")
_MADE_BYTES = 8


class TierKeys:
    """Keys of tenants in a bucket. Lives on one event loop.

    Args:
        limit_s: Limit of each request, seconds.
        marks: Purges: a key of before one of its tenant is refused.
    """

    def __init__(
        self,
        bucket: Bucket,
        wrapper: KeyWrapper,
        marks: PurgeMarks,
        metrics: PoolMetrics,
        limit_s: float,
    ) -> None:
        self._bucket, self._wrapper, self._limit_s = bucket, wrapper, limit_s
        self._marks = marks
        self._unknown = metrics.shared_unreadable.labels(reason="unknown_key")
        self._sealing: dict[str, TenantKey] = {}
        self._known: dict[str, TenantKey] = {}
        self._old: set[str] = set()
        """Names of known keys that an earlier key of the site wrapped: they seal nothing new."""
        self._asking: dict[object, str] = {}
        """Tenants of the requests under way whose result may be kept: no purge came meanwhile."""

    async def sealing(self, tenant: str) -> TenantKey:
        """The key for new blocks of a tenant: one that is in the bucket, or a new one.

        A key that an earlier key of the site wrapped is not used: that one may be removed.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        for _ in range(ATTEMPTS):
            if tenant in self._sealing:
                return self._sealing[tenant]
            with self._unpurged(tenant) as is_valid:
                key = await self._found(tenant) or await self._make(tenant)
                if is_valid():
                    self._sealing[tenant] = key
                    self._know(key)
        raise TransferError("the tenant's keys are being destroyed")

    async def _found(self, tenant: str) -> TenantKey | None:
        for ref in await self._refs(tenant):
            key = await self.get(ref)
            if key is not None and ref not in self._old:
                return key
        return None

    async def get(self, ref: str) -> TenantKey | None:
        """The key of that name; None if it is gone, or cannot be unwrapped.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        if ref in self._known:
            return self._known[ref]
        found = _PATH.fullmatch(path := f"{FOLDER}/{ref}")
        if found is None:
            return None
        tenant = "" if found[1] == NO_TENANT else found[1]
        with self._unpurged(tenant) as is_valid:
            key = await self._read(path, tenant, found[2])
            if key is None or not is_valid():
                self._old.discard(ref)
                return None
            self._know(key)
        return key

    async def _read(self, path: str, tenant: str, key_id: str) -> TenantKey | None:
        try:
            data = bytes(await self._bucket.read(path, 0, OBJECT_BYTES_MAX, self._limit_s))
            made_s = int.from_bytes(data[:_MADE_BYTES], "big")
            bare = TenantKey(bytes.fromhex(key_id), tenant, made_s, b"")
            secret = self._wrapper.unwrap(data[_MADE_BYTES:], bare.bound)
        except UnknownKeyError:
            self._unknown.inc()
            return None
        except (GoneError, AlteredError):
            return None
        if len(secret) != KEY_BYTES or made_s < self._marks.not_before_s(tenant):
            return None
        key = TenantKey(bare.id, tenant, made_s, secret)
        if not self._wrapper.is_current(data[_MADE_BYTES:]):
            self._old.add(key.ref)
        return key

    @contextlib.contextmanager
    def _unpurged(self, tenant: str) -> Iterator[Callable[[], bool]]:
        """Yield a test that is true until the tenant's keys are destroyed."""
        token = object()
        self._asking[token] = tenant
        try:
            yield lambda: token in self._asking
        finally:
            self._asking.pop(token, None)

    async def destroy(self, tenant: str) -> int:
        """Delete the keys of a tenant from the bucket, and forget them; return their number.

        Raises:
            TransferError: The server failed, did not answer in time, or still lists some.
        """
        self.forget(tenant)
        refs = await self._refs(tenant)
        await self._bucket.delete([f"{FOLDER}/{ref}" for ref in refs], self._limit_s)
        self.forget(tenant)
        left = set(refs).intersection(await self._refs(tenant))
        if left:
            raise TransferError(
                f"the bucket has answered that {len(refs)} keys of the tenant were deleted, and "
                f"still lists {len(left)} of them"
            )
        return len(refs)

    def forget(self, tenant: str) -> None:
        """Drop the keys of a tenant from memory."""
        self._sealing.pop(tenant, None)
        for ref in [ref for ref, key in self._known.items() if key.tenant == tenant]:
            del self._known[ref]
            self._old.discard(ref)
        for token in [token for token, of in self._asking.items() if of == tenant]:
            del self._asking[token]

    def _know(self, key: TenantKey) -> None:
        if len(self._known) >= KNOWN_MAX:
            ref = next(iter(self._known))
            del self._known[ref]
            self._old.discard(ref)
        self._known[key.ref] = key

    async def _refs(self, tenant: str) -> list[str]:
        under = f"{FOLDER}/{tenant or NO_TENANT}"
        found: list[str] = []
        async for part in self._bucket.list(self._limit_s, under):
            found += [path.removeprefix(f"{FOLDER}/") for path, _ in part if _PATH.fullmatch(path)]
        return sorted(found)

    async def _make(self, tenant: str) -> TenantKey:
        key = new_key(tenant, max(int(time.time()), self._marks.not_before_s(tenant)))
        wrapped = self._wrapper.wrap(key.secret, key.bound)
        data = key.made_s.to_bytes(_MADE_BYTES, "big") + wrapped
        if len(data) > OBJECT_BYTES_MAX:
            raise TransferError(f"a wrapped key of {len(data)} bytes")
        await self._bucket.write(f"{FOLDER}/{key.ref}", data, self._limit_s)
        return key
