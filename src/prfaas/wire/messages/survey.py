"""The engines of a pool node, asked for once: what `prfaas check` compares."""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.wire.messages.base import Message
from prfaas.wire.messages.fields import Count, Name
from prfaas.wire.messages.layouts import LAYOUTS_MAX, LayoutFacts, LayoutSpec

ENGINES_MAX = 1024


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine that its blocks do not depend on; 0 is unknown.

    `ranks` divide the heads of the model. `block_tokens` is the block size of the engine itself,
    which blocks of the layout combine.
    """

    ranks: Count
    block_tokens: Count


UNKNOWN = EngineShape(ranks=0, block_tokens=0)


class Survey(Message, tag="survey"):
    """Ask for the engines of a pool node. An older one closes the connection."""


class Surveyed(Message, tag="surveyed"):
    """Answer to `Survey`: layout and shape by engine, and the facts of the layouts."""

    layouts: Annotated[dict[Name, LayoutSpec], msgspec.Meta(max_length=ENGINES_MAX)]
    shapes: Annotated[dict[Name, EngineShape], msgspec.Meta(max_length=ENGINES_MAX)]
    facts: Annotated[list[LayoutFacts], msgspec.Meta(max_length=LAYOUTS_MAX)] = msgspec.field(
        default_factory=list
    )
