"""Prompt lengths from public traces, with the prefix hits that a cache would give.

Two formats: Mooncake's JSON lines (`input_length`, `output_length`, `hash_ids` of 512-token
blocks) and CSV with one length a row. Either may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from prfaas.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
_CSV_INPUT = ("ContextTokens", "input_length", "num_tokens", "tokens")
_CSV_OUTPUT = ("GeneratedTokens", "output_length")


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """What a trace says about lengths.

    Args:
        new_tokens: Incremental length of each request, at least 1 token.
        mean_prompt_tokens: Mean whole prompt.
        mean_output_tokens: Mean output; 0 when the trace does not say.
    """

    new_tokens: tuple[int, ...]
    mean_prompt_tokens: float
    mean_output_tokens: float

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of prompt tokens that the cache served."""
        return 1 - sum(self.new_tokens) / (self.mean_prompt_tokens * len(self.new_tokens))


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class _Request(msgspec.Struct):
    input_length: _Tokens
    output_length: _Tokens = 0
    hash_ids: list[int] = []


class BlockCache:
    """Least-recently-used set of block ids.

    Args:
        num_blocks_max: Blocks it holds; None for no limit.
    """

    def __init__(self, num_blocks_max: int | None) -> None:
        self._max = num_blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match_and_store(self, block_ids: list[int]) -> int:
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


def read_trace(path: Path, cache_blocks: int | None = None) -> TraceLengths:
    """Incremental lengths of a trace replayed against one prefix cache.

    Args:
        path: `.jsonl`, `.csv`, or either with `.gz`.
        cache_blocks: Size of the cache in blocks of 512 tokens; None is infinite.

    Raises:
        ConfigError: The file can not be read or is in neither format.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix == ".gz" else raw
        requests = list(_requests(path, data.decode("utf-8")))
    except (OSError, EOFError, zlib.error, csv.Error, RecursionError, ValueError) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    if not any(request.input_length for request in requests):
        raise ConfigError(f"trace {path} holds no requests")
    return _replay(requests, BlockCache(cache_blocks))


def _requests(path: Path, text: str) -> Iterable[_Request]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        decoder = msgspec.json.Decoder(_Request)
        return (decoder.decode(line) for line in text.splitlines() if line.strip())
    if name.endswith(".csv"):
        return _csv_requests(path, text)
    raise ConfigError(f"trace {path}: expected a name ending in .jsonl, .csv, or either with .gz")


def _csv_requests(path: Path, text: str) -> Iterator[_Request]:
    rows = csv.DictReader(io.StringIO(text))
    columns = rows.fieldnames or ()
    inputs = next((c for c in _CSV_INPUT if c in columns), None)
    outputs = next((c for c in _CSV_OUTPUT if c in columns), None)
    if inputs is None:
        raise ConfigError(f"trace {path} has none of the columns {', '.join(_CSV_INPUT)}")
    for row in rows:
        lengths = {"input_length": row[inputs], "output_length": row[outputs] if outputs else 0}
        yield msgspec.convert(lengths, _Request, strict=False)


def _replay(requests: list[_Request], cache: BlockCache) -> TraceLengths:
    new_tokens = []
    for request in requests:
        hit = cache.match_and_store(request.hash_ids) * MOONCAKE_BLOCK_TOKENS
        # The last id usually names a partial block, and the last token is always computed.
        new_tokens.append(max(request.input_length - hit, 1))
    count = len(requests)
    return TraceLengths(
        tuple(new_tokens),
        sum(r.input_length for r in requests) / count,
        sum(r.output_length for r in requests) / count,
    )
