"""Keys of tenants in a bucket that the pool nodes of a site share.

    PREFIX/keys/TENANT/ID    one wrapped key: made_s u64, then the key, wrapped by the site's key

TENANT is the tag of the tenant, or `none`. The pool node that first writes a block of a tenant
makes its key; the others find it in the bucket. Two nodes that do so at once make two keys, which
is harmless: every block names its key. To purge a tenant its keys are deleted, and all pool nodes
forget them: what is sealed with them is lost, also in objects that stay.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from prfaas.errors import TransferError
from prfaas.pool.keys.sealing import AlteredError, UnknownKeyError
from prfaas.pool.keys.tenant_keys import KEY_BYTES, TenantKey, new_key
from prfaas.pool.keys.wrapping import KeyWrapper
from prfaas.pool.shared.bucket import Bucket, GoneError

FOLDER, NO_TENANT = "keys", "none"
OBJECT_BYTES_MAX = 4096
KNOWN_MAX = 4096
"""Keys that a node keeps in memory."""
_PATH = re.compile(rf"{FOLDER}/(none|[0-9a-f]{{32}})/([0-9a-f]{{32}})")
_MADE_BYTES = 8


def ref_of(key: TenantKey) -> str:
    """Name of a key, as blocks refer to it: TENANT/ID."""
    return f"{key.tenant or NO_TENANT}/{key.id.hex()}"


class TierKeys:
    """Keys of tenants in a bucket. Lives on one event loop.

    Args:
        bucket: Has the keys.
        wrapper: Wraps them.
        limit_s: Limit of each request, seconds.
        clock_s: Time since 1970, seconds.
    """

    def __init__(
        self,
        bucket: Bucket,
        wrapper: KeyWrapper,
        limit_s: float,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._bucket, self._wrapper, self._limit_s = bucket, wrapper, limit_s
        self._clock_s = clock_s
        self._sealing: dict[str, TenantKey] = {}
        self._known: dict[str, TenantKey] = {}

    async def sealing(self, tenant: str) -> TenantKey:
        """The key for new blocks of a tenant: one that is in the bucket, or a new one.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        key = self._sealing.get(tenant)
        if key is None:
            for ref in await self._refs(tenant):
                key = key or await self.get(ref)
            key = key or await self._make(tenant)
            self._sealing[tenant] = key
            self._know(key)
        return key

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
        try:
            data = bytes(await self._bucket.read(path, 0, OBJECT_BYTES_MAX, self._limit_s))
            tenant = "" if found[1] == NO_TENANT else found[1]
            made_s = int.from_bytes(data[:_MADE_BYTES], "big")
            bare = TenantKey(bytes.fromhex(found[2]), tenant, made_s, b"")
            secret = self._wrapper.unwrap(data[_MADE_BYTES:], bare.bound)
        except (GoneError, AlteredError, UnknownKeyError):
            return None
        if len(secret) != KEY_BYTES:
            return None
        key = TenantKey(bare.id, tenant, made_s, secret)
        self._know(key)
        return key

    async def destroy(self, tenant: str) -> int:
        """Delete the keys of a tenant from the bucket, and forget them; return their number.

        Raises:
            TransferError: The server failed, or did not answer in time.
        """
        self.forget(tenant)
        refs = await self._refs(tenant)
        await self._bucket.delete([f"{FOLDER}/{ref}" for ref in refs], self._limit_s)
        self.forget(tenant)
        return len(refs)

    def forget(self, tenant: str) -> None:
        """Drop the keys of a tenant from memory."""
        self._sealing.pop(tenant, None)
        for ref in [ref for ref, key in self._known.items() if key.tenant == tenant]:
            del self._known[ref]

    def _know(self, key: TenantKey) -> None:
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[ref_of(key)] = key

    async def _refs(self, tenant: str) -> list[str]:
        under = f"{FOLDER}/{tenant or NO_TENANT}"
        found: list[str] = []
        async for part in self._bucket.list(self._limit_s, under):
            found += [path.removeprefix(f"{FOLDER}/") for path, _ in part if _PATH.fullmatch(path)]
        return sorted(found)

    async def _make(self, tenant: str) -> TenantKey:
        key = new_key(tenant, int(self._clock_s()))
        wrapped = self._wrapper.wrap(key.secret, key.bound)
        data = key.made_s.to_bytes(_MADE_BYTES, "big") + wrapped
        if len(data) > OBJECT_BYTES_MAX:
            raise TransferError(f"a wrapped key of {len(data)} bytes")
        await self._bucket.write(f"{FOLDER}/{ref_of(key)}", data, self._limit_s)
        return key
