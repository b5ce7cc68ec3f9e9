"""Targets of purges: blocks of a pool, of a tenant, or of the prompt of one request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.core.cache.keep_rules import Effect
from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.gateway.telemetry.recent_names import Recent
from prfaas.wire.messages.gateway import Order

_Name = Annotated[str, msgspec.Meta(max_length=256)]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Blocks that a purge drops. One of `source`, `tenant` and `request` is meant."""

    source: _Name = ""
    """Name of a pool."""
    tenant: _Name = ""
    """Name of a tenant, also of that of a request."""
    tag: Annotated[str, msgspec.Meta(max_length=32)] | None = None
    """Tag of the tenant, also of a request; None for a pool."""
    request: _Name = ""
    hashes: Annotated[bytes, msgspec.Meta(max_length=MANIFEST_BYTES_MAX)] = b""
    """Hashes of the blocks of its prompt, one behind the other."""

    @classmethod
    def of(cls, recent: Recent, tag: str) -> Target:
        """Return the blocks of the prompt of a recent request, of a tenant with this tag."""
        return cls(tenant=recent.tenant, tag=tag, request=recent.request, hashes=recent.hashes)

    def __str__(self) -> str:
        if self.request:
            return f"prompt of request {self.request}"
        return f"source {self.source}" if self.tag is None else f"tenant {self.tenant}"

    def order(self, effect: Effect, for_ns: int = 0, *, is_dry: bool = False) -> Order:
        """Return the order on the blocks; without a time, its end."""
        is_prompt = bool(self.request)
        return Order(
            job=0,
            effect=effect,
            source=self.source,
            tenant=(self.tag or "") if is_prompt else self.tag,
            hashes=self.hashes if is_prompt else None,
            for_ns=for_ns,
            is_dry=is_dry,
        )
