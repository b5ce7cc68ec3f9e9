"""Origins of blocks, so that all blocks from a defective pool can be dropped.

A block names the pools that its bytes, or those that it was computed from, came from:

- A block that came over a link is of the pool that sent it. What the sender has of others itself it
  marks, and that block is EVERY: it goes whichever pool is purged.
- A block that an engine stores is of every pool of which the engine has loaded a block that lies
  before it in the same prompt (`engines/lineage.py`).
- What engines computed without any such block is of no pool.

All blocks that came together share one `Origin`: a block costs a reference, 8 bytes, in memory and
in the index of the disk, and at most ORIGIN_BYTES_MAX in its record on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec

from prfaas.core.cache.eviction import NOT_READ_S, UNKNOWN_S
from prfaas.wire.messages.fields import EVERY, SOURCES_MAX, Sources

PURGED = "purged"
"""Reason for the end of a block or transfer from a pool that is being purged."""
SHARED_MAX = 4096
"""Origins that are kept for the next block alike."""
ORIGIN_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a block.

    Attributes:
        sources: Pools that it came from, or was computed from; EVERY among them stands for any.
        via: The engine or pool that handed it over.
        transfer_id: The transfer, and so the ticket, that it came with; empty for an engine's.
        tenant: Tag of the tenant that it belongs to (`core/kv/tenant_salts.py`); empty if unknown.
        born_s: Unix time of its computation, seconds (`eviction.py`); 0 if unknown.
    """

    sources: frozenset[str] = frozenset()
    via: str = ""
    transfer_id: bytes = b""
    tenant: str = ""
    born_s: int = UNKNOWN_S

    def is_of(self, source: str) -> bool:
        """Return True if it has to go when `source` is purged."""
        return source in self.sources or EVERY in self.sources

    @property
    def sender(self) -> str:
        """Pool that sent it over a link, also if another node read it from a shared tier.

        Empty if it was computed at this site, or the sender cannot be told from other names.
        """
        others = self.sources - {EVERY, self.via}
        if not self.transfer_id or len(others) > 1:
            return ""
        return next(iter(others), self.via)


@dataclass(frozen=True, slots=True)
class Scope:
    """Blocks that a purge drops: those of a source, or those of a tenant.

    Attributes:
        source: Name of a pool; not used with a tenant.
        tenant: Tag of the tenant, empty for blocks without one; None for a source.
    """

    source: str = ""
    tenant: str | None = None

    def matches(self, origin: Origin) -> bool:
        """Return True if blocks of that origin are dropped."""
        if self.tenant is not None:
            return origin.tenant == self.tenant
        return origin.is_of(self.source)

    def covers(self, origin: Origin, pool: str) -> bool:
        """The same for blocks of a pool node: if that is the source, all are."""
        return (self.tenant is None and self.source == pool) or self.matches(origin)

    def __str__(self) -> str:
        return f"source {self.source}" if self.tenant is None else f"tenant {self.tenant or '-'}"


LOCAL = Origin()
"""Computed here, from nothing that came from elsewhere."""
UNKNOWN = Origin(frozenset({EVERY}))
"""Origin of a block that was stored by a version without origins."""
Matches = Callable[[Origin], bool]
"""Depends on the sources and the tenant of an origin alone."""
SLICE = 4096
"""Blocks that a purge inspects before other work has its turn: a millisecond or two."""
T = TypeVar("T")


def sliced(items: Sequence[T], size: int = SLICE) -> Iterator[Sequence[T]]:
    """Split items into parts of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def joined(sources: Iterable[str]) -> frozenset[str]:
    """Names of pools, together; more than SOURCES_MAX of them are EVERY."""
    found = frozenset(sources)
    return frozenset({EVERY}) if EVERY in found or len(found) > SOURCES_MAX else found


@lru_cache(SHARED_MAX)
def received(
    peer: str,
    transfer_id: bytes,
    tenant: str = "",
    born_s: int = UNKNOWN_S,
    *,
    is_inherited: bool,
) -> Origin:
    """The origin of a block that came over a link.

    Args:
        tenant: Tag of the tenant in its ticket.
        born_s: When it was computed.
        is_inherited: True if the sender has it, or a block it was computed from, from others.
    """
    sources = frozenset({peer, EVERY} if is_inherited else {peer})
    return Origin(sources, peer, transfer_id, tenant, born_s)


@lru_cache(SHARED_MAX)
def computed(
    engine: str, sources: frozenset[str], tenant: str = "", born_s: int = UNKNOWN_S
) -> Origin:
    """The origin of a block that an engine stores.

    Args:
        sources: Pools of which it used blocks.
        tenant: Tag of the tenant, as the engine named it.
        born_s: The time at present.
    """
    return Origin(joined(sources), engine, tenant=tenant, born_s=born_s)


def read_by(reader: str, writer: str, origin: Origin) -> Origin:
    """Return the origin of a block for a node that reads what another one wrote.

    Args:
        reader: Name of the node.
        writer: Node that wrote the block, and so is one of its sources.
        origin: As it was written.
    """
    if writer == reader:
        return origin
    sources = joined({*origin.sources, writer})
    return Origin(sources, writer, origin.transfer_id, origin.tenant, origin.born_s)


class _Spec(msgspec.Struct, array_like=True, frozen=True):
    sources: Sources
    via: str
    transfer_id: bytes
    tenant: str
    born_s: Annotated[int, msgspec.Meta(ge=0, lt=NOT_READ_S)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Spec)


@lru_cache(SHARED_MAX)
def origin_bytes(origin: Origin) -> bytes:
    """An origin as the disk keeps it, ORIGIN_BYTES_MAX at most."""
    spec = _Spec(
        sorted(origin.sources), origin.via, origin.transfer_id, origin.tenant, origin.born_s
    )
    return _encoder.encode(spec)


@lru_cache(SHARED_MAX)
def origin_in(data: bytes) -> Origin:
    """The origin encoded by `origin_bytes`; UNKNOWN if the bytes are invalid."""
    try:
        spec = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UNKNOWN
    return Origin(frozenset(spec.sources), spec.via, spec.transfer_id, spec.tenant, spec.born_s)
