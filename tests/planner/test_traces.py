from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.workload import read_trace
from prfaas.traces.requests import BlockCache

TRACES = Path(__file__).parents[2] / "examples" / "sim" / "traces"


def _write(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_prefix_hits_shorten_prompts(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1200, "output_length": 10, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1300, "output_length": 30, "hash_ids": [1, 2, 4]},
        {"timestamp": 2, "input_length": 1200, "output_length": 20, "hash_ids": [1, 2, 3]},
    ]
    trace = read_trace(_write(tmp_path / name, rows))
    # The third is the first again: its last, partial block counts as 512 tokens, and at least the
    # last token is computed.
    assert trace.new_tokens == (1200, 1300 - 1024, 1)
    assert trace.mean_output_tokens == 20
    assert trace.prefix_hit_ratio == pytest.approx(1 - 1477 / 3700)


def test_a_small_cache_forgets_the_oldest() -> None:
    cache = BlockCache(3)
    assert cache.match_and_store([1, 2]) == 0
    assert cache.match_and_store([3, 4]) == 0
    assert cache.match_and_store([1, 2]) == 1  # 2 is older than 1 and was evicted
    assert BlockCache(None).match_and_store([9]) == 0


def test_lengths_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("GeneratedTokens,ContextTokens\n5,10\n15,30\n")
    trace = read_trace(path)
    assert trace.new_tokens == (10, 30)
    assert trace.mean_prompt_tokens == 20


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "t.csv",
            "a,b\n1,2\n",
            "line 1 with the columns a, b; expected JSON lines with input_length",
        ),
        ("t.jsonl", "{}\n", r"line 1 with the fields \(none\); expected"),
        ("t.jsonl", "", "holds no requests"),
        ("t.csv", "tokens\n", "holds no requests"),
        ("t.csv", "tokens\n0\n", "line 2: tokens is 0; expected 1 to"),
        ("t.csv", "tokens,output_length\n5\n", "line 2: 1 values; expected 2"),
        ("t.csv", "tokens\n-5\n", "tokens is -5; expected 1 to"),
        ("t.csv", "tokens\nmany\n", "tokens is 'many'; expected a whole number"),
        ("t.jsonl", '{"input_length": -5}', "input_length is -5; expected 1 to"),
        ("t.jsonl", '{"input_length": 5}\n{"input_length"', "line 2: Input data was truncated"),
        ("t.parquet", "x", "line 1 with the columns x"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_trace_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    whole = gzip.compress(b'{"input_length": 5}\n' * 100)
    for damaged in (whole[:-4], whole[:12] + b"\xff\xff" + whole[14:], b"no gzip"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"trace .*t\.jsonl\.gz cannot be read: "):
            read_trace(path)


@pytest.mark.parametrize(
    ("cache_blocks", "hit_ratio"), [(None, 0.374), (30_000, 0.332), (10_000, 0.215), (3_000, 0.066)]
)
def test_hits_of_the_mooncake_trace(cache_blocks: int | None, hit_ratio: float) -> None:
    # kvcache-ai/Mooncake, FAST25 conversation trace: 12,031 requests, mean input 12,035 tokens.
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.gz", cache_blocks)
    assert len(trace.new_tokens) == 12_031
    assert trace.mean_prompt_tokens == pytest.approx(12_035, abs=1)
    assert trace.prefix_hit_ratio == pytest.approx(hit_ratio, abs=0.001)
