"""Gateway and pool, over TLS: comparison of received blocks with blocks that were computed here."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import Count, Key, LayoutId, Name, PurgedSource

PAIRS_MAX = 4096
"""Pairs of one comparison, under half a megabyte of names."""
DTYPES_MAX = 32
ALTERED_MAX = 256
"""Altered blocks of one answer, the first of the pairs."""
Differences = dict[Name, Annotated[float, msgspec.Meta(ge=0)]]
"""Largest difference by type (`core/kv/difference.py`)."""


class Compare(Message, tag="compare"):
    """Compare blocks that hold the same content under two names, and drop the second version."""

    job: Count
    layout_id: LayoutId
    pairs: Annotated[list[tuple[Key, Key]], msgspec.Meta(max_length=PAIRS_MAX)]
    """The name of a block as it was received, and that of its version computed here."""
    limits: Annotated[Differences, msgspec.Meta(max_length=DTYPES_MAX)] = msgspec.field(
        default_factory=dict
    )
    """Largest differences of blocks that are not altered."""


class Altered(msgspec.Struct, array_like=True, frozen=True):
    """A block with a difference above its limit."""

    place: Count
    """In the pairs."""
    sender: PurgedSource
    """Pool that sent the received version over a link; empty if it is not known."""
    is_inherited: bool
    """The sender has it, or computed it, from blocks of others."""


class Compared(Message, tag="compared"):
    """Answer to `Compare`."""

    job: Count
    num_equal: Count
    """Pairs with the same bytes."""
    num_different: Count
    num_missing: Count
    """Pairs of which a version is not in this pool."""
    worst: Annotated[Differences, msgspec.Meta(max_length=DTYPES_MAX)]
    altered: Annotated[list[Altered], msgspec.Meta(max_length=ALTERED_MAX)] = msgspec.field(
        default_factory=list
    )
    missing: Annotated[list[Count], msgspec.Meta(max_length=PAIRS_MAX)] = msgspec.field(
        default_factory=list
    )
    """Places of those in the pairs."""
