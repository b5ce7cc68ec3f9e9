"""Recorded requests, and the cache that their blocks meet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from prfaas.records import Record
from prfaas.traces.checks import BLOCK_ID_MAX

Unit = Literal["s", "ms"]
BlockId = Annotated[int, msgspec.Meta(ge=0, le=BLOCK_ID_MAX)]


class MooncakeLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line: `timestamp` in ms, lengths in tokens, ids of the prompt's blocks, tenant.

    `timestamp_unit` on the first line names the unit of all timestamps; it is written by
    `prfaas trace import`, and elsewhere the unit is that of the format unless it cannot be.
    """

    timestamp: float | None = None
    timestamp_unit: Unit | None = None
    input_length: int
    output_length: int | None = None
    hash_ids: list[BlockId] = []
    tenant: str = ""


class BlockIds(msgspec.Struct):
    """The ids of a line, whatever they are."""

    hash_ids: list[int] = []


class RecordedRequest(Record, frozen=True):
    """A recorded request: instant, lengths in tokens, ids of the prompt's blocks, tenant.

    An id names its block and all before it; the last block may be a partial one. No ids: nothing
    is known of common prefixes.
    """

    at_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""


class BlockCache:
    """Least-recently-used set of block ids.

    Args:
        num_blocks_max: Blocks it holds; None for no limit.
    """

    def __init__(self, num_blocks_max: int | None) -> None:
        self._max = num_blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match_and_store(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks that are there; afterwards all of them are."""
        matched = 0
        for block in block_ids:
            if block not in self._blocks:
                break
            matched += 1
        for block in reversed(block_ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while self._max is not None and len(self._blocks) > self._max:
            self._blocks.popitem(last=False)
        return matched


def new_tokens(
    prompts: Sequence[tuple[int, Sequence[int]]], block_tokens: int, num_blocks_max: int | None
) -> list[int]:
    """Tokens of each prompt that are left after the prefix match, at least 1.

    Args:
        prompts: Tokens and block ids of each, in order of arrival.
        num_blocks_max: Size of the cache in blocks; None for no limit.
    """
    cache = BlockCache(num_blocks_max)
    # The last id usually names a partial block, and the last token is always computed.
    return [
        max(num_tokens - cache.match_and_store(ids) * block_tokens, 1)
        for num_tokens, ids in prompts
    ]
