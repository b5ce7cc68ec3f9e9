"""Limits on the contents of a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Limits on the size of a trace and of what it holds.

    Attributes:
        num_prompt_tokens_max: Tokens of a prompt of chat transcripts.
        num_block_ids_max: Ids of blocks, over all requests of a trace.
        num_chat_blocks_max: Different blocks of chat transcripts.
    """

    file_bytes_max: int = 4 * 2**30
    line_bytes_max: int = 2**24
    num_requests_max: int = 5_000_000
    num_prompt_tokens_max: int = 2_000_000
    num_block_ids_max: int = 50_000_000
    num_chat_blocks_max: int = 8_000_000


LIMITS = TraceLimits()
NUM_REQUESTS_MAX = LIMITS.num_requests_max
NUM_PROMPT_TOKENS_MAX = LIMITS.num_prompt_tokens_max
NUM_OUTPUT_TOKENS_MAX = 2_000_000
BLOCK_ID_MAX = 2**48
TENANT_CHARS_MAX = 128
SECONDS_MAX = 10.0**9
"""Limit of a pause."""
INSTANT_S_MAX = 10.0**10
"""Seconds since 1970 in the year 2286."""
SPAN_S = 366 * 86_400
"""An instant that is further from the trace's median is damaged."""
