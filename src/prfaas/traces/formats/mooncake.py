"""Mooncake's schema: JSON lines with the ids of the prompts' blocks, or without them."""

from __future__ import annotations

import msgspec

from prfaas.traces import limits
from prfaas.traces.checks import check_output, check_prompt, decode, in_range
from prfaas.traces.drops import DroppedError
from prfaas.traces.requests import Row
from prfaas.units import NS_PER_MS

NAME = "mooncake"
TITLE = "Mooncake's schema"
BLOCK_TOKENS = 512


class MooncakeLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line: `timestamp` in ms, lengths in tokens, ids of the prompt's blocks, tenant."""

    timestamp: float | None = None
    input_length: int
    output_length: int | None = None
    hash_ids: list[int] = []
    tenant: str = ""


class MooncakeRows:
    """Rows of a file in Mooncake's schema.

    Args:
        block_tokens: Tokens of a block; where ids are given, every block of a prompt has its own.
        complete: Instants and output lengths are needed.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, *, complete: bool = True) -> None:
        self._block_tokens, self._complete = block_tokens, complete
        self._decoder = msgspec.json.Decoder(MooncakeLine)
        self._known: dict[int, int] = {}

    def __call__(self, line: bytes) -> Row:
        """The request of a line.

        Raises:
            DroppedError: The line has no request.
        """
        row = decode(self._decoder, line)
        if self._complete and (row.timestamp is None or row.output_length is None):
            missing = "timestamp" if row.timestamp is None else "output_length"
            raise DroppedError(f"{missing} is missing")
        at_ms, output = row.timestamp or 0, row.output_length or 0
        in_range("timestamp", at_ms, 0, limits.INSTANT_S_MAX * 1000, "ms")
        check_prompt("input_length", row.input_length)
        check_output("output_length", output)
        if len(row.tenant) > limits.TENANT_CHARS_MAX:
            raise DroppedError(
                "tenant is too long",
                f"tenant has {len(row.tenant):,} characters; at most {limits.TENANT_CHARS_MAX}",
            )
        self._check_ids(row)
        # The same int object for the same id: prompts share the memory as they share the blocks.
        shared = tuple(map(self._known.setdefault, row.hash_ids, row.hash_ids))
        return Row(round(at_ms * NS_PER_MS), row.input_length, max(output, 1), shared, row.tenant)

    def _check_ids(self, row: MooncakeLine) -> None:
        if not row.hash_ids:
            return
        num_blocks = -(-row.input_length // self._block_tokens)
        if len(row.hash_ids) != num_blocks:
            raise DroppedError(
                f"hash_ids are not the prompt's blocks of {self._block_tokens:,} tokens",
                f"{len(row.hash_ids):,} hash_ids for {row.input_length:,} prompt tokens, which are "
                f"{num_blocks:,} blocks of {self._block_tokens:,}; name every block or none, or "
                "set the tokens of the trace's blocks: cache.block_tokens, or --block-tokens",
            )
        least, greatest = min(row.hash_ids), max(row.hash_ids)
        worst = least if least < 0 else greatest
        in_range("an id of hash_ids", worst, 0, limits.BLOCK_ID_MAX)


def mooncake_line(row: Row) -> MooncakeLine:
    """The line that a request is written as."""
    at_ms = row.at_ns / NS_PER_MS
    return MooncakeLine(
        timestamp=int(at_ms) if at_ms.is_integer() else at_ms,
        input_length=row.num_prompt_tokens,
        output_length=row.num_output_tokens,
        hash_ids=list(row.block_ids),
        tenant=row.tenant,
    )
