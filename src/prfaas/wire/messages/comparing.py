"""Gateway and pool, over TLS: comparison of received blocks with blocks that were computed here."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import Count, Key, LayoutId, Name

PAIRS_MAX = 4096
"""Pairs of one comparison, under half a megabyte of names; a gateway compares the last ones."""
DTYPES_MAX = 32


class Compare(Message, tag="compare"):
    """Compare blocks that hold the same content under two names, and drop the second version."""

    job: Count
    layout_id: LayoutId
    pairs: Annotated[list[tuple[Key, Key]], msgspec.Meta(max_length=PAIRS_MAX)]
    """The name of a block as it was received, and that of its version computed here."""


class Compared(Message, tag="compared"):
    """Answer to `Compare`."""

    job: Count
    num_equal: Count
    """Pairs with the same bytes."""
    num_different: Count
    num_missing: Count
    """Pairs of which a version is not in this pool."""
    worst: Annotated[
        dict[Name, Annotated[float, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=DTYPES_MAX)
    ]
    """Largest difference by type (`core/integrity/difference.py`)."""
