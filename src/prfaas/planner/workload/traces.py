"""Prompt lengths from recorded workloads, with the prefix hits that a cache would give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prfaas.traces.block_cache import new_tokens
from prfaas.traces.formats.detect import SESSIONS, detect
from prfaas.traces.formats.mooncake import BLOCK_TOKENS
from prfaas.traces.reader import read_requests
from prfaas.traces.requests import RecordedRequest
from prfaas.traces.sessions.flatten import block_tokens_of, flattened
from prfaas.traces.sessions.session_file import read_sessions


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Lengths of a trace.

    Args:
        new_tokens: Incremental length of each request, at least 1 token.
        mean_output_tokens: Mean output; one that is missing or 0 counts as 1.
    """

    new_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    mean_prompt_tokens: float
    mean_output_tokens: float

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of prompt tokens that the cache served."""
        return 1 - sum(self.new_tokens) / (self.mean_prompt_tokens * len(self.new_tokens))


def read_trace(path: Path, cache_blocks: int | None = None) -> TraceLengths:
    """Incremental lengths of a trace replayed against one prefix cache.

    Args:
        path: A trace in any of the formats of `prfaas.traces`, or sessions; gzipped or not.
        cache_blocks: Size of the cache in blocks of 512 tokens; None is infinite.

    Raises:
        ConfigError: The file cannot be read, is in no known format, or a line is damaged.
    """
    form, block_tokens = detect(path), BLOCK_TOKENS
    rows: tuple[RecordedRequest, ...]
    if form == SESSIONS:
        sessions = read_sessions(path)
        block_tokens = block_tokens_of(sessions, BLOCK_TOKENS)
        rows = flattened(sessions, block_tokens)
    else:
        rows = read_requests(path, form, complete=False).rows
    prompts = [(row.num_prompt_tokens, row.block_ids) for row in rows]
    cached = None if cache_blocks is None else cache_blocks * BLOCK_TOKENS // block_tokens
    new = tuple(new_tokens(prompts, block_tokens, cached))
    return TraceLengths(
        new,
        tuple(max(row.num_prompt_tokens - n, 0) for row, n in zip(rows, new, strict=True)),
        sum(row.num_prompt_tokens for row in rows) / len(rows),
        sum(row.num_output_tokens for row in rows) / len(rows),
    )
