"""Arrivals: rates, traces, scaling, tenants, and errors of wrong files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.planner.workload import LogNormalLengths
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.workloads.make import ScaledWorkload, stretched
from prfaas.sim.workloads.requests import SineSwing, Synthetic, Trace, draw_arrivals
from prfaas.traces.checks import TraceLimits
from prfaas.traces.formats.columns import Steps, read_rate_curve
from prfaas.traces.reader import read_requests
from prfaas.traces.requests import RecordedRequest
from prfaas.traces.sessions.session_file import read_sessions
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES

TRACES = EXAMPLES / "traces"


def test_a_measured_curve_gives_its_rate_in_every_window() -> None:
    curve = Steps((1.0, 3.0, 0.0, 2.0), period_s=400)
    times = draw_arrivals(np.random.default_rng(1), 100.0, 800.0, shape=curve)
    counts = np.histogram(times, np.arange(0, 801, 100))[0]
    # Two periods; a rate of 100/s on the mean of 1.5 units.
    for count, unit in zip(counts, (1, 3, 0, 2) * 2, strict=True):
        expected = 100 * 100 * unit / 1.5
        assert abs(count - expected) <= 4 * max(expected, 1) ** 0.5


def test_a_swing_starts_low_and_keeps_its_mean() -> None:
    swing = SineSwing(0.5, period_s=1000)
    times = draw_arrivals(np.random.default_rng(1), 50.0, 1000.0, shape=swing)
    assert len(times) == pytest.approx(50_000, rel=0.02)
    first, second = np.histogram(times, [0, 100, 500])[0]
    assert first / 100 < 0.55 * 50
    assert second / 400 > first / 100


def test_the_curve_of_a_model_is_found_and_stretched() -> None:
    path = TRACES / "servegen_rates.csv"
    day = read_rate_curve(path, "deepseek-r1")
    assert (len(day.rates), day.period_s) == (144, 86_400)
    assert read_rate_curve(path, "m-large", period_s=7200).period_s == 7200
    with pytest.raises(ConfigError, match="no curve of 'gpt'; there are deepseek-r1, m-large"):
        read_rate_curve(path, "gpt")


def test_azure_keeps_instants_and_lengths() -> None:
    rows = read_requests(TRACES / "azure_conversation_2023.csv.gz", "azure").rows
    assert len(rows) == 19_366
    assert (rows[0].at_ns, rows[0].num_prompt_tokens, rows[0].num_output_tokens) == (0, 374, 44)
    # 18:15:46.6805900 to 18:15:50.9951690
    assert rows[1].at_ns == 4_314_579_000
    mean = sum(row.num_prompt_tokens for row in rows) / len(rows)
    assert mean == pytest.approx(1155, rel=0.01)


def test_a_trace_at_twice_the_rate_takes_half_the_time_with_all_its_tokens() -> None:
    rows = read_requests(TRACES / "mooncake_conversation.jsonl.gz", "mooncake").rows
    once, twice = Trace(rows), Trace(rows).with_rate_scaled(2.0)
    a, b = once.requests(1), twice.requests(1)
    assert b[-1].arrived_at_ns * 2 == pytest.approx(a[-1].arrived_at_ns, abs=2)
    assert [r.num_prompt_tokens for r in a] == [r.num_prompt_tokens for r in b]


def test_jitter_stays_within_the_tick_and_keeps_every_request() -> None:
    rows = tuple(RecordedRequest(3 * NS_PER_S * (i // 10), 100 + i, 1) for i in range(100))
    found = Trace(rows, jitter_ns=3 * NS_PER_S).requests(7)
    assert Counter(r.num_prompt_tokens for r in found) == Counter(range(100, 200))
    for request in found:
        tick = (request.num_prompt_tokens - 100) // 10
        assert tick * 3 * NS_PER_S <= request.arrived_at_ns < (tick + 1) * 3 * NS_PER_S
    assert all(a.arrived_at_ns <= b.arrived_at_ns for a, b in pairwise(found))


@given(
    shared=st.integers(0, 30),
    tails=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    scale=st.floats(0.1, 5),
)
def test_common_prefixes_are_scaled_with_the_prompts(
    shared: int, tails: tuple[int, int], scale: float
) -> None:
    ids = iter(range(1000))
    prefix = tuple(next(ids) for _ in range(shared))
    prompts = [prefix + tuple(next(ids) for _ in range(tail)) for tail in tails]
    longer = [stretched(p, scale, ceil(len(p) * scale)) for p in prompts]
    for blocks, prompt in zip(longer, prompts, strict=True):
        assert len(blocks) == len(set(blocks)) == ceil(len(prompt) * scale)
    common = 0
    for a, b in zip(*longer, strict=False):
        if a != b:
            break
        common += 1
    assert shared * scale - 1 <= common <= shared * scale + 1
    # What differs after the common prefix never meets again.
    assert not set(longer[0][common:]) & set(longer[1][common:])


def test_tenants_get_their_shares_and_change_nothing_else() -> None:
    lengths = LogNormalLengths(7, 1, 100, 5000)
    source = Synthetic(10.0, 1000 * NS_PER_S, lengths, 100)
    plain = ScaledWorkload(source).requests(3)
    shared = ScaledWorkload(source, tenants={"batch": 3, "chat": 1}).requests(3)
    counts = Counter(r.tenant for r in shared)
    assert counts["batch"] / len(shared) == pytest.approx(0.75, abs=0.03)
    assert set(counts) == {"batch", "chat"}
    assert [(r.arrived_at_ns, r.num_prompt_tokens) for r in plain] == [
        (r.arrived_at_ns, r.num_prompt_tokens) for r in shared
    ]


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": -1}, "line 2: timestamp is -1; expected 0 to"),
        ({"input_length": 0}, "line 2: input_length is 0; expected 1 to 2,000,000 tokens"),
        ({"input_length": 10**12}, "input_length is 1,000,000,000,000; expected"),
        ({"output_length": -3}, "output_length is -3"),
        ({"input_length": "long"}, r"line 2: Expected `int`, got `str` - at `\$.input_length`"),
        ({"hash_ids": [1, -1]}, "an id of hash_ids is -1; expected 0 to"),
        ({"hash_ids": [1, 2**60]}, "an id of hash_ids is 1,152,921,504,606,846,976"),
        ({"hash_ids": [1] * 700}, "700 hash_ids for 600 prompt tokens, which are 2 blocks of 512"),
        ({"hash_ids": [1]}, "1 hash_ids for 600 prompt tokens, which are 2 blocks"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | change)}\n")
    with pytest.raises(ConfigError, match=message):
        read_requests(path, "mooncake")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yesterday,1,1", "line 2: TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:46.1,many,1", "ContextTokens is 'many'; expected a whole number"),
        ("2023-11-16 18:15:46.1,0,1", "ContextTokens is 0; expected 1 to"),
        ("2023-11-16 18:15:46.1,5", "2 values"),
    ],
)
def test_a_wrong_line_of_azure_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_requests(path, "azure")


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({"requests": [{"t": 0}]}, "needs `in` and `out`"),
        ({"requests": [{"t": 0, "in": 0, "out": 1}]}, "line 1: in is 0"),
        ({"requests": [{"t": 0, "in": 9, "out": 1, "think": -2}]}, "is -2; expected 0 to"),
        ({"requests": [{"t": 0, "in": 9, "out": 1, "h": [[1, 9], [20, 1]]}]}, "more blocks than"),
        ({"requests": [{"t": 0, "in": 9, "out": 1}], "shared": [[1, 0]]}, "in shared is 0"),
        ({"requests": [{"t": -1, "in": 9, "out": 1}]}, "t is -1; expected 0 to"),
        ({"requests": [{"t": 0, "sub": []}]}, "a sub-agent comes before"),
        ({"block_size": 0, "requests": [{"t": 0, "in": 9, "out": 1}]}, "block_size is 0"),
        ({"dup_of": "other"}, "holds no sessions"),
    ],
)
def test_a_wrong_session_is_named(tmp_path: Path, session: dict[str, object], message: str) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps({"block_size": 64} | session))
    with pytest.raises(ConfigError, match=message):
        read_sessions(path)


def test_sessions_in_another_format_are_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": []}')
    with pytest.raises(ConfigError, match="holds no sessions but chats; prfaas trace import makes"):
        read_sessions(path)
    path.write_text(json.dumps(GOOD))
    with pytest.raises(ConfigError, match=r'but mooncake; .*requests are for arrivals = "trace"'):
        read_sessions(path)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b"x" * 100_000)[:-20])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for path, message in ((broken, "cannot be read"), (empty, "no requests")):
        with pytest.raises(ConfigError, match=message):
            read_requests(path, "mooncake")


def test_a_trace_beyond_the_limits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n" * 3)
    with pytest.raises(ConfigError, match="line 3: the trace exceeds 200 bytes"):
        read_requests(path, "mooncake", limits=TraceLimits(file_bytes_max=200))
    with pytest.raises(ConfigError, match="line 1: is longer than 50 bytes"):
        read_requests(path, "mooncake", limits=TraceLimits(line_bytes_max=50))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["workload.arrivals=sessions", "workload.trace=x"], "cannot be read"),
        (["workload.arrivals=sessions", "workload.trace=x", "workload.users=3"], "and not both"),
        (["workload.curve=x"], "curve and curve_model belong together"),
        (["workload.curve=x", "workload.curve_model=y"], 'curve is for arrivals = "diurnal", not'),
        (["workload.cv=3"], 'cv is for arrivals = "gamma" or "diurnal", not for arrivals = "poiss'),
        (["workload.jitter=3s"], 'jitter is for arrivals = "trace" or "azure", not'),
        (
            ['failure=[{kind="pool", at="1s", duration="1s", capacity=0.5}]'],
            'for kind = "link", not',
        ),
        (
            ['failure=[{kind="link", at="1s", duration="1s", rebuild="1s"}]'],
            'for kind = "pool", not',
        ),
        (["workload.prompt_scale=100"], "lower workload.prompt_scale"),
        (["workload.tenants.a=0"], "greater than 0"),
    ],
)
def test_a_wrong_workload_is_one_clear_error(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scenario(EXAMPLES / "paper-poisson.toml", settings)


def test_a_trace_in_another_format_than_azure_names_the_setting_that_reads_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "imported.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3}\n')
    settings = ['workload.arrivals="azure"', f'workload.trace="{path}"']
    with pytest.raises(ConfigError, match=r'in the format mooncake.*set arrivals = "trace"'):
        load_scenario(EXAMPLES / "azure.toml", settings)
