"""Targets of purges: blocks of a pool, of a tenant, or of the prompt of one request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.wire.messages.gateway import Purge, PurgeEnd, PurgePrefix

HASHES_BYTES_MAX = MANIFEST_BYTES_MAX
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Blocks that a purge drops. One of `source`, `tenant` and `request` is meant.

    Attributes:
        source: Name of a pool.
        tenant: Name of a tenant, also of that of a request.
        tag: Tag of the tenant, also of a request; None for a pool.
        hashes: Hashes of the blocks of its prompt, one behind the other.
    """

    source: _Name = ""
    tenant: _Name = ""
    tag: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    request: _Name = ""
    hashes: Annotated[bytes, msgspec.Meta(max_length=HASHES_BYTES_MAX)] = b""

    def __str__(self) -> str:
        if self.request:
            return f"prompt of request {self.request}"
        return f"source {self.source}" if self.tag is None else f"tenant {self.tenant}"

    def asks(self, job: int, *, is_dry: bool) -> Purge | PurgePrefix:
        """Return the message that has a pool node drop the blocks, or count them."""
        if self.request:
            tag = self.tag or ""
            return PurgePrefix(job=job, hashes=self.hashes, tenant=tag, is_dry=is_dry)
        return Purge(job=job, source=self.source, is_dry=is_dry, tenant=self.tag)

    def ends(self, job: int) -> PurgeEnd | PurgePrefix:
        """Return the message after which a pool node takes the blocks again."""
        if self.request:
            tag = self.tag or ""
            return PurgePrefix(job=job, hashes=self.hashes, tenant=tag, is_over=True)
        return PurgeEnd(job=job, source=self.source, tenant=self.tag)
