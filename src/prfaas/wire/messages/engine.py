"""Engine and pool, on a unix socket."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import (
    GROUPS_MAX,
    Blocks,
    Count,
    Extent,
    Key,
    Name,
    RunList,
    Sources,
    Tag,
    Text,
    TicketBytes,
    TransferId,
)
from prfaas.wire.messages.layouts import FactMap, LayoutSpec, ModelWords
from prfaas.wire.messages.survey import UNKNOWN, EngineShape

Groups = Annotated[list[Count], msgspec.Meta(max_length=GROUPS_MAX)]


class EngineHello(Message, tag="engine_hello"):
    """First message of an engine; its shared memory's descriptor travels with it.

    `extents` has the parts of a row with data for every cache group, in the order of the block.
    A group is in `runs` instead if ranks hold parts of its block in another order, or copies of
    them. `facts` are what the layout id is a digest of; an older engine sends none, and no shape.

    Rows begin every `row_bytes`. Where the parts of a row are interleaved with those of others,
    `row_span` is the distance from its begin to the end of its last part; 0 is `row_bytes`.
    Processes of one engine that have memory of their own announce one layout, and each names the
    groups that lie in the memory of others in `elsewhere`.
    """

    engine: Name
    layout: LayoutSpec
    row_bytes: Annotated[int, msgspec.Meta(ge=1)]
    num_rows: Annotated[int, msgspec.Meta(ge=1)]
    extents: dict[int, list[Extent]]
    facts: FactMap = msgspec.field(default_factory=dict)
    model: ModelWords = ""
    runs: dict[int, RunList] = msgspec.field(default_factory=dict)
    row_span: Count = 0
    elsewhere: Groups = msgspec.field(default_factory=list)
    shape: EngineShape = UNKNOWN


class Push(Message, tag="push"):
    """`Store`s that name this transfer are also pushed to `peer` from now on.

    `blocks` is the list that the ticket was signed for.
    """

    transfer_id: TransferId
    peer: Name
    ticket: TicketBytes = b""
    blocks: Blocks = msgspec.field(default_factory=dict)


class Store(Message, tag="store"):
    """Keep these rows as blocks; `pushed` are the ones that the transfer still needs.

    `sources` are the pools of which the engine has used blocks to compute these. `tenant` is the
    tenant that they belong to; an older engine names none.
    """

    job: Count
    keys: list[Key]
    rows: list[Count]
    transfer_id: TransferId | None = None
    pushed: list[bool] = msgspec.field(default_factory=list)
    sources: Sources = msgspec.field(default_factory=list)
    tenant: Tag = ""


class StoreDone(Message, tag="store_done"):
    """Answer to `Store`: the rows may be reused."""

    job: Count
    stored: bool


class PushDone(Message, tag="push_done"):
    """The engine has stored all blocks of this transfer that it computes.

    `rest` are blocks that the transfer needs and that were not stored for it: the engine had them
    cached. What the pool node holds of them is pushed, then the transfer is committed.
    """

    transfer_id: TransferId
    rest: list[Key] = msgspec.field(default_factory=list)


class Lookup(Message, tag="lookup"):
    """Lookup of blocks, repeated until none is in transit."""

    job: Count
    keys: list[Key]
    transfer_id: TransferId | None = None
    source: Text = ""


class LookupDone(Message, tag="lookup_done"):
    """Answer to `Lookup`: one byte a key, `HIT`, `MISS` or `ON_ITS_WAY`."""

    job: Count
    found: bytes


MISS, HIT, ON_ITS_WAY = 0, 1, 2


class TransferOver(Message, tag="transfer_over"):
    """Notice of the end of a transfer that the engine waits for."""

    transfer_id: TransferId


REQUEST_CHARS_MAX = 512
"""Characters of a request's id that tell it from others."""


class Load(Message, tag="load"):
    """Copy these blocks into these rows.

    The slow reads of all loads of a request share one time limit; an older engine names none.
    """

    job: Count
    keys: list[Key]
    rows: list[Count]
    request: Text = ""


class LoadDone(Message, tag="load_done"):
    """Answer to `Load`: one byte a key, 1 if the row now holds the block.

    `sources` are the pools that these blocks came from, or were computed from.
    """

    job: Count
    loaded: bytes
    sources: Sources = msgspec.field(default_factory=list)


class Touch(Message, tag="touch"):
    """These blocks were used: they should be evicted later than others."""

    keys: list[Key]
