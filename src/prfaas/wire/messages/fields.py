"""The fields that messages are made of, with their limits; keys, from and to the core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from prfaas.core.kv.blocks import HASH_BYTES, LAYOUT_ID_BYTES, BlockKey
from prfaas.core.kv.shipping import MANIFEST_BYTES_MAX
from prfaas.core.kv.tenant_salts import TAG_CHARS, TAG_PATTERN
from prfaas.wire.frames import TRANSFER_ID_BYTES

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
LayoutId = Annotated[bytes, msgspec.Meta(min_length=LAYOUT_ID_BYTES, max_length=LAYOUT_ID_BYTES)]
TransferId = Annotated[
    bytes, msgspec.Meta(min_length=TRANSFER_ID_BYTES, max_length=TRANSFER_ID_BYTES)
]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Limit of times of a monotonic clock: after 104 days of uptime they are beyond 2**53."""
PULL_KEYS_MAX = 16_384
"""Blocks of one pull: under a megabyte of names."""
TENANTS_SHOWN_MAX = 32
TENANTS_HELD_MAX = 64
"""Tenants whose bytes a pool reports."""
SHARES_MAX = 1000
"""Tenants of a gateway."""
MaxAge = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
"""Seconds."""
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Tag = Annotated[str, msgspec.Meta(max_length=TAG_CHARS, pattern=TAG_PATTERN)]
"""Tag of a tenant (`core/kv/tenant_salts.py`); empty if unknown."""
PurgedSource = Annotated[str, msgspec.Meta(max_length=64)]
"""Name of a pool; empty if a tenant is purged."""
TIERS_MAX = 8
TICKET_BYTES_MAX = 16 << 10
TicketBytes = Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES_MAX)]
"""A sealed ticket (`wire/tickets.py`). An empty one is refused where it is checked."""
BlockHash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Key = tuple[Count, BlockHash]
PullKeys = Annotated[list[Key], msgspec.Meta(max_length=PULL_KEYS_MAX)]
GROUPS_MAX = 256
Blocks = Annotated[
    dict[Count, Annotated[bytes, msgspec.Meta(max_length=MANIFEST_BYTES_MAX)]],
    msgspec.Meta(max_length=GROUPS_MAX),
]
"""The list of blocks that a transfer may move (`core/kv/shipping.py`)."""
SOURCES_MAX = 8
"""Pools that a block names as where it came from; more of them are EVERY."""
Source = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[ -~]+\Z")]
"""ASCII, so that as many as there may be fit into a record on disk."""
Sources = Annotated[list[Source], msgspec.Meta(max_length=SOURCES_MAX)]
CODECS_MAX = 16
Codecs = Annotated[list[Name], msgspec.Meta(max_length=CODECS_MAX)]
"""Names of codecs (`core/codec/codecs.py`); those that are not known are ignored."""
TAKES_MAX = 128
Takes = Annotated[list[Name], msgspec.Meta(max_length=TAKES_MAX)]
"""Tags of the messages that a part takes over a connection; an older part names none."""
Extent = tuple[Count, Count]
"""Offset and length, bytes, within a row of the engine's shared memory."""
RUNS_MAX = 65_536
"""Strided copies of one group: two parts of 512 layers at 64 ranks are as many."""
RunSpec = tuple[Count, Count, Count, Count, Count, Count]
"""A strided copy between a row and a block (`core/kv/canonical/copies.py`)."""
RunList = Annotated[list[RunSpec], msgspec.Meta(max_length=RUNS_MAX)]


def keys_of(keys: list[Key]) -> list[BlockKey]:
    """Wire keys as the core knows them."""
    return [BlockKey(group, block_hash) for group, block_hash in keys]


def wire_keys(keys: Iterable[BlockKey]) -> list[Key]:
    """Keys of the core, ready for the wire."""
    return [(key.group, key.block_hash) for key in keys]
