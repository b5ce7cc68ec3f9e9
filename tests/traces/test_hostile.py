"""Nothing that a file holds makes a reader fail in a way of its own."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from math import ceil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.planner.workload import read_trace
from prfaas.traces.checks import TraceLimits
from prfaas.traces.figures import figures_of
from prfaas.traces.formats.detect import mooncake_line
from prfaas.traces.reader import TracePart, read_requests
from prfaas.traces.requests import RecordedRequest
from prfaas.traces.sessions.block_chain import characters
from prfaas.traces.sessions.chats import read_chats
from prfaas.traces.sessions.session_file import read_sessions, session_lines, write_lines

DATA = Path(__file__).parent / "data"
READERS: tuple[Callable[[Path], object], ...] = (
    read_requests,
    lambda path: read_requests(path, damaged_max=0.99),
    lambda path: read_chats(path, characters(2), damaged_max=0.99),
    read_sessions,
    read_trace,
)
_many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=4)
    ),
    max_leaves=12,
)
_FIELDS = {
    *("timestamp", "input_length", "output_length", "hash_ids", "tenant"),
    *("block_size", "requests", "shared", "start"),
    *(
        "messages",
        "conversations",
        "message",
        "role",
        "from",
        "content",
        "value",
        "tools",
        "system",
    ),
    *("id", "session_id", "tool_calls", "type", "text"),
}
_objects = st.dictionaries(st.sampled_from(sorted(_FIELDS)), _json, max_size=6)
_messages = st.lists(_objects | _json, max_size=4)


def read_all(path: Path) -> None:
    for read in READERS:
        with contextlib.suppress(ConfigError):
            read(path)


@_many
@given(data=st.binary(max_size=200), packed=st.booleans())
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes, packed: bool) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(data) if packed else data)
    read_all(path)


@_many
@given(
    lines=st.lists(
        _objects | st.builds(lambda m, o: o | {"messages": m}, _messages, _objects), max_size=5
    )
)
def test_any_json_is_read_or_refused(tmp_path: Path, lines: list[object]) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read_all(path)


@pytest.mark.parametrize(
    "name", ["mooncake_conversation_40.jsonl", "azure_2024.csv", "burstgpt_3.csv", "servegen.csv"]
)
@_many
@given(
    at=st.integers(0, 2000),
    cut=st.integers(0, 30),
    put=st.binary(max_size=12),
    packed=st.booleans(),
)
def test_a_file_with_a_change_is_read_or_refused(
    tmp_path: Path, name: str, at: int, cut: int, put: bytes, packed: bool
) -> None:
    data = (DATA / name).read_bytes()
    data = gzip.compress(data) if packed else data
    at %= len(data)
    path = tmp_path / "trace"
    path.write_bytes(data[:at] + put + data[at + cut :])
    read_all(path)


_rows = st.lists(
    st.builds(
        RecordedRequest,
        st.integers(0, 10**15),
        st.integers(1, 5000),
        st.integers(1, 5000),
        st.just(()),
        st.text(max_size=5).filter(str.isprintable),
    ),
    min_size=1,
    max_size=20,
)


@_many
@given(rows=_rows, seed=st.integers(0, 10**6))
def test_what_is_written_is_read_again_in_order(
    tmp_path: Path, rows: list[RecordedRequest], seed: int
) -> None:
    with_ids = [
        row._replace(block_ids=tuple(range(seed, seed + ceil(row.num_prompt_tokens / 512))))
        for row in rows
    ]
    path = tmp_path / "out.jsonl.gz"
    write_lines(path, [mooncake_line(row, "ms") for row in with_ids])
    found = read_requests(path)
    first = min(row.at_ns for row in rows)
    expected = sorted(with_ids, key=lambda row: row.at_ns)
    assert found.rows == tuple(row._replace(at_ns=row.at_ns - first) for row in expected)
    assert figures_of(found.rows, 512).num_requests == len(rows)


@_many
@given(
    texts=st.lists(st.text(max_size=300), min_size=2, max_size=8),
    per_token=st.floats(0.25, 9),
)
def test_sessions_of_any_texts_can_be_read(
    tmp_path: Path, texts: list[str], per_token: float
) -> None:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text.encode("utf-8", "replace").decode()}
        for i, text in enumerate(texts)
    ]
    source, path = tmp_path / "chats.jsonl", tmp_path / "out.jsonl.gz"
    source.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    chats = read_chats(source, characters(per_token))
    write_lines(path, session_lines(chats, 1.0))
    (session,) = read_sessions(path)
    assert len(session.turns) == len(texts) // 2
    for turn in session.turns:
        num_blocks = sum(count for _, count in turn.runs)
        assert num_blocks == -(-turn.num_prompt_tokens // session.block_tokens)


def test_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    limits = TraceLimits(file_bytes_max=10**6, line_bytes_max=10**5)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"tokens\n" + b"1" * 10**8))
    with pytest.raises(ConfigError, match="line 2: the trace exceeds 1,000,000 bytes"):
        read_requests(path, "lengths", complete=False, damaged_max=0.5, limits=limits)


def test_a_part_of_a_trace_without_an_end_is_read_no_further(tmp_path: Path) -> None:
    seen: list[int] = []
    path = tmp_path / "long.csv"
    path.write_text("tokens\n" + "5\n" * 500_000)
    read_requests(
        path, "lengths", complete=False, part=TracePart(num_requests=3), on_progress=seen.append
    )
    assert not seen
