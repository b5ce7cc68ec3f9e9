"""Targets of purges: blocks of a pool, or blocks of a tenant."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Name = Annotated[str, msgspec.Meta(max_length=256)]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks that a purge drops. Exactly one of `source` and `tenant` is given.

    Attributes:
        source: Name of a pool.
        tenant: Name of a tenant.
        tag: Tag of the tenant; None for a pool.
    """

    source: _Name = ""
    tenant: _Name = ""
    tag: Annotated[str, msgspec.Meta(max_length=32)] | None = None

    def __str__(self) -> str:
        return f"source {self.source}" if self.tag is None else f"tenant {self.tenant}"
