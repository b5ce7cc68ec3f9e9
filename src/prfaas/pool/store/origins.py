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

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Annotated, TypeVar

import msgspec

from prfaas.core.cache.eviction import NOT_READ_S, UNKNOWN_S
from prfaas.core.cache.keep_rules import EVERY, Origin
from prfaas.wire.messages.fields import SOURCES_MAX, Sources

PURGED = "purged"
"""Reason for the end of a block or transfer from a pool that is being purged."""
SHARED_MAX = 4096
"""Origins that are kept for the next block alike."""
ORIGIN_BYTES_MAX = 1024


LOCAL = Origin()
"""Computed here, from nothing that came from elsewhere."""
UNKNOWN = Origin(frozenset({EVERY}))
"""Origin of a block that was stored by a version without origins."""
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
