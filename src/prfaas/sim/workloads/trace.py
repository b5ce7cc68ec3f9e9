"""Recorded requests, replayed at their instants whatever the answers take: an open loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from prfaas.errors import ConfigError
from prfaas.sim.request import Request
from prfaas.sim.workloads.reading import (
    BLOCK_ID_MAX,
    NUM_OUTPUT_TOKENS_MAX,
    NUM_PROMPT_TOKENS_MAX,
    SECONDS_MAX,
    decode,
    in_range,
    read_lines,
    refuse,
)
from prfaas.sim.workloads.source import NUM_REQUESTS_MAX

_NS_PER_MS = 1_000_000


class Row(NamedTuple):
    """A recorded request: instant, lengths in tokens, ids of the prompt's blocks, tenant."""

    at_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests.

    Attributes:
        rows: In any order.
        jitter_ns: Each arrival is moved by up to so much, within the trace's tick.
        rate_scale: Arrivals come so many times as fast.
        num_requests_max: Only the first so many; None is all.
    """

    rows: tuple[Row, ...]
    jitter_ns: int = 0
    rate_scale: float = 1.0
    num_requests_max: int | None = None

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival."""
        rng, count = np.random.default_rng(seed), len(self.rows)
        jitters = rng.integers(self.jitter_ns, size=count).tolist() if self.jitter_ns else []
        found = [
            (round((row.at_ns + jitter) / self.rate_scale), row)
            for row, jitter in zip(self.rows, jitters or [0] * count, strict=True)
        ]
        found.sort(key=itemgetter(0))
        return [
            Request(i, at_ns, r.num_prompt_tokens, r.num_output_tokens, r.block_ids, r.tenant)
            for i, (at_ns, r) in enumerate(found[: self.num_requests_max])
        ]

    def with_rate_scaled(self, factor: float) -> Trace:
        """The same, `factor` times as fast."""
        return replace(self, rate_scale=self.rate_scale * factor)

    @property
    def num_prompt_tokens_max(self) -> int:
        """The longest prompt, tokens."""
        return max(row.num_prompt_tokens for row in self.rows)


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    tenant: str = msgspec.field(default="")


def read_mooncake(path: Path, block_tokens: int = 512) -> tuple[Row, ...]:
    """A trace in Mooncake's schema.

    Args:
        path: JSON lines, gzipped or not: `timestamp` in ms, `input_length`, `output_length`,
            `hash_ids` of the prompt's blocks (the last may be a partial one), `tenant` if known.
        block_tokens: Tokens of a block; every block of a prompt has to have its id.

    Raises:
        ConfigError: The file or a line of it is wrong.
    """
    decoder, known = msgspec.json.Decoder(_MooncakeRow), _Known()
    return collect(
        path,
        (
            _mooncake(path, n, decode(decoder, path, n, line), block_tokens, known)
            for n, line in read_lines(path)
        ),
    )


class _Known(dict[int, int]):
    """Ids that were read, so that prompts share the numbers as they share the blocks."""

    def shared(self, ids: list[int]) -> tuple[int, ...]:
        """The same ids, each the number that was read first."""
        return tuple(map(self.setdefault, ids, ids))


def _mooncake(path: Path, n: int, row: _MooncakeRow, block_tokens: int, known: _Known) -> Row:
    in_range(path, n, "timestamp", row.timestamp, 0, SECONDS_MAX * 1000, "ms")
    check_lengths(path, n, ("input_length", row.input_length), ("output_length", row.output_length))
    num_blocks = -(-row.input_length // block_tokens)
    if len(row.hash_ids) != num_blocks:
        refuse(
            path,
            n,
            f"{len(row.hash_ids):,} hash_ids for {row.input_length:,} prompt tokens, which are "
            f"{num_blocks:,} blocks of {block_tokens:,}; name every block, or set "
            "cache.block_tokens to the tokens of the trace's blocks",
        )
    least, greatest = min(row.hash_ids), max(row.hash_ids)
    if least < 0 or greatest > BLOCK_ID_MAX:
        worst = least if least < 0 else greatest
        in_range(path, n, "an id of hash_ids", worst, 0, BLOCK_ID_MAX)
    return Row(
        round(row.timestamp * _NS_PER_MS),
        row.input_length,
        max(row.output_length, 1),
        known.shared(row.hash_ids),
        row.tenant,
    )


def check_lengths(path: Path, line: int, prompt: tuple[str, int], output: tuple[str, int]) -> None:
    """Refuse lengths out of range; each comes with the name of its field.

    Raises:
        ConfigError: One is.
    """
    in_range(path, line, *prompt, 1, NUM_PROMPT_TOKENS_MAX, "tokens")
    in_range(path, line, *output, 0, NUM_OUTPUT_TOKENS_MAX, "tokens")


def collect(path: Path, rows: Iterable[Row]) -> tuple[Row, ...]:
    """All rows; at least one, and not too many.

    Raises:
        ConfigError: A limit is exceeded.
    """
    found: list[Row] = []
    for row in rows:
        if len(found) == NUM_REQUESTS_MAX:
            raise ConfigError(f"trace {path}: more than {NUM_REQUESTS_MAX:,} requests; split it")
        found.append(row)
    if not found:
        raise ConfigError(f"trace {path} holds no requests")
    return tuple(found)
