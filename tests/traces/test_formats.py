"""Every public format: what it holds, found by its first lines, and read alike by everybody."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.workload import read_trace
from prfaas.traces.checks import TraceLimits
from prfaas.traces.formats.detect import detect
from prfaas.traces.reader import TracePart, read_requests
from prfaas.traces.requests import RecordedRequest
from prfaas.units import NS_PER_S

DATA = Path(__file__).parent / "data"
MS = 1_000_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def written(tmp_path: Path, text: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "form", "count", "second"),
    [
        ("mooncake_conversation_40.jsonl", "mooncake", 40, RecordedRequest(0, 7322, 490)),
        ("claude_code_flat_12.jsonl", "mooncake", 12, None),
        ("azure_conv_2023_40.csv", "azure", 40, RecordedRequest(4_314_579_000, 396, 109)),
        ("azure_code_2023_40.csv", "azure", 40, RecordedRequest(52 * MS, 3180, 8)),
        ("azure_2024.csv", "azure", 4, RecordedRequest(3_500_000, 2604, 7)),
        ("burstgpt.csv", "burstgpt", 3, RecordedRequest(24 * NS_PER_S, 920, 144)),
        ("burstgpt_3.csv", "burstgpt", 3, RecordedRequest(7 * NS_PER_S, 812, 3)),
        ("servegen.csv", "servegen", 3, RecordedRequest(499_905_000, 15, 25)),
    ],
)
def test_every_public_format_is_detected_and_read(
    name: str, form: str, count: int, second: RecordedRequest | None
) -> None:
    reading = read_requests(DATA / name)
    assert (reading.form, len(reading.rows)) == (form, count)
    assert reading.rows[0].at_ns == 0
    assert second is None or reading.rows[1]._replace(block_ids=(), tenant="") == second


@pytest.mark.parametrize(
    "name", ["mooncake_conversation_40.jsonl", "azure_2024.csv", "burstgpt.csv", "servegen.csv"]
)
def test_gzip_a_byte_order_mark_and_crlf_change_nothing(tmp_path: Path, name: str) -> None:
    text = (DATA / name).read_bytes()
    disguised = b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n\r\n")
    rows = read_requests(DATA / name).rows
    assert read_requests(written(tmp_path, disguised)).rows == rows
    assert read_requests(written(tmp_path, gzip.compress(text), "no-suffix")).rows == rows


@pytest.mark.parametrize("name", ["azure_2024.csv", "burstgpt.csv", "servegen.csv"])
def test_columns_come_in_any_order_with_others_beside_them(tmp_path: Path, name: str) -> None:
    lines = (DATA / name).read_text().splitlines()
    turned = [",".join([*reversed(line.split(",")), '"x, y"']) for line in lines]
    path = written(tmp_path, "\n".join(turned))
    assert read_requests(path) == read_requests(DATA / name)


def test_instants_of_two_time_zones_are_put_in_order(tmp_path: Path) -> None:
    rows = (
        "2024-05-10 02:00:01+02:00,1,1\n"
        "2024-05-10 00:00:00.5+00:00,2,1\n"
        "2024-05-09T19:00:03Z,3,1\n"
        "2024-05-09 19:00:02.25-0500,4,1\n"
        "2024-05-10 00:00:04,5,1\n"
    )
    found = read_requests(written(tmp_path, AZURE + rows))
    assert [(r.num_prompt_tokens, r.at_ns // MS) for r in found.rows] == [
        (3, 0),
        (2, 17_997_500),
        (1, 17_998_000),
        (4, 17_999_250),
        (5, 18_001_000),
    ]
    assert found.num_unordered == 2


def test_unordered_requests_are_sorted_and_counted(tmp_path: Path) -> None:
    path = written(tmp_path, BURSTGPT + "9,G,1,1,2,A\n7,G,2,1,3,A\n8,G,3,1,4,A\n10,G,4,1,5,A\n")
    found = read_requests(path)
    assert [row.num_prompt_tokens for row in found.rows] == [2, 3, 1, 4]
    assert [row.at_ns // NS_PER_S for row in found.rows] == [0, 1, 2, 3]
    assert found.num_unordered == 2


UNORDERED = "90,G,1,1,2,A\n70,G,2,1,3,A\n80,G,3,1,4,A\n60,G,4,1,5,A\n100,G,5,1,6,A\n"


@pytest.mark.parametrize(
    ("part", "prompts"),
    [
        (TracePart(), [4, 2, 3, 1, 5]),
        (TracePart(num_requests=2), [4, 2]),
        (TracePart(duration_ns=15 * NS_PER_S), [4, 2]),
        (TracePart(start_ns=15 * NS_PER_S), [3, 1, 5]),
        (TracePart(start_ns=5 * NS_PER_S, duration_ns=30 * NS_PER_S, num_requests=2), [2, 3]),
    ],
)
def test_a_part_of_an_unordered_trace_counts_from_its_earliest_request(
    tmp_path: Path, part: TracePart, prompts: list[int]
) -> None:
    found = read_requests(written(tmp_path, BURSTGPT + UNORDERED), part=part)
    assert [row.num_prompt_tokens for row in found.rows] == prompts
    assert found.drops.num_dropped == 5 - len(prompts)
    assert found.drops.num_damaged == 0


def test_a_part_does_not_count_from_a_damaged_instant(tmp_path: Path) -> None:
    early = "TIMESTAMP,ContextTokens,GeneratedTokens\n1970-01-01 00:00:00,9,1\n"
    rows = "".join(f"2024-05-10 00:00:0{7 - i},{i},1\n" for i in range(7))
    part = TracePart(duration_ns=3 * NS_PER_S, num_requests=2)
    found = read_requests(written(tmp_path, early + rows), part=part, damaged_max=0.9)
    assert [row.num_prompt_tokens for row in found.rows] == [6, 5]


def test_mooncake_without_hashes_knows_no_prefixes(tmp_path: Path) -> None:
    rows = (
        '{"timestamp": 5, "input_length": 600, "output_length": 3}\n'
        '{"timestamp": 9.5, "input_length": 600, "output_length": 0, "hash_ids": []}\n'
        '{"timestamp": 12, "input_length": 600, "output_length": 9, "hash_ids": [7, 8]}\n'
    )
    found = read_requests(written(tmp_path, rows), unit="ms").rows
    assert found == (
        RecordedRequest(0, 600, 3),
        RecordedRequest(4_500_000, 600, 1),
        RecordedRequest(7 * MS, 600, 9, (7, 8)),
    )


def test_failed_requests_of_burstgpt_are_left_out_but_are_no_damage() -> None:
    drops = read_requests(DATA / "burstgpt.csv").drops
    assert (drops.num_lines, drops.num_dropped, drops.num_damaged) == (4, 1, 0)
    (reason,) = drops.reasons
    assert reason.startswith("failed requests")
    assert drops.reasons[reason].first_line == 4


MOONCAKE = '{"timestamp": 1, "input_length": 5, "output_length": 1}\n'
DAMAGED = [
    (AZURE, "2023-11-16 18:15:46.1,-5,1", "ContextTokens is -5; expected 1 to 2,000,000 tokens"),
    (AZURE, "2023-11-16 18:15:46.1,0,1", "ContextTokens is 0"),
    (AZURE, "2023-11-16 18:15:46.1,5,-1", "GeneratedTokens is -1; expected 0 to"),
    (AZURE, "2023-11-16 18:15:46.1,99999999,1", "ContextTokens is 99,999,999"),
    (AZURE, "2023-11-16 18:15:46.1,9" + "9" * 400 + ",1", "expected a whole number"),
    (AZURE, "2023-13-16 18:15:46.1,5,1", "TIMESTAMP is '2023-13-16 18:15:46.1'; expected as in"),
    (AZURE, "2023-11-16 18:15:46+99:00,5,1", "TIMESTAMP is"),
    (AZURE, "2023-11-16 18:15:46.1,5,1,7", "4 values; expected 3"),
    (AZURE, "2023-11-16 18:15:46.1,٣,1", r"ContextTokens is '\\u0663'; expected a whole"),
    (AZURE, "\udcff\udcfe,5,1", "TIMESTAMP is"),
    (BURSTGPT, "-1,G,5,5,10,A", "Timestamp is -1; expected 0 to"),
    (BURSTGPT, "nan,G,5,5,10,A", "Timestamp is 'nan'; expected seconds"),
    (BURSTGPT, "1e99,G,5,5,10,A", "Timestamp is 1e\\+99; expected 0 to"),
    (BURSTGPT, "5,G,,5,10,A", "Request tokens is ''"),
    (MOONCAKE, '{"timestamp": 1e400, "input_length": 5, "output_length": 1}', "line 2: "),
    (MOONCAKE, '{"timestamp": 1, "output_length": 1}', "required field `input_length`"),
    (MOONCAKE, '{"timestamp": 1, "input_length": 5}', "output_length is missing"),
    (MOONCAKE, '{"input_length": 5, "output_length": 5}', "timestamp is missing"),
    (MOONCAKE, '{"timestamp": null, "input_length": "5"}', "Expected `int`"),
    (MOONCAKE, "[" * 100_000, "line 2: "),
    (MOONCAKE, '{"timestamp": 1, "input_len', "truncated"),
    (MOONCAKE, MOONCAKE.strip()[:-1] + ', "tenant": "' + "x" * 200 + '"}', "200 characters"),
]


@pytest.mark.parametrize(("head", "line", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_is_an_error_or_dropped_with_its_reason(
    tmp_path: Path, head: str, line: str, message: str
) -> None:
    good = {AZURE: "2023-11-16 18:15:47,5,1", BURSTGPT: "7,G,5,5,10,A", MOONCAKE: MOONCAKE.strip()}
    text = f"{head}{line}\n" + f"{good[head]}\n" * 10
    path = written(tmp_path, text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message) as raised:
        read_requests(path)
    assert "line 2: " in str(raised.value)
    found = read_requests(path, damaged_max=0.2)
    assert len(found.rows) == 10 + (head == MOONCAKE)
    (reason,) = found.drops.reasons.values()
    assert (reason.count, reason.first_line, reason.damaged) == (1, 2, True)
    with pytest.raises(ConfigError, match=r"1 of 1\d lines are damaged, more than 5\.00%.*line 2"):
        read_requests(path, damaged_max=0.05)


def test_an_instant_far_from_all_others_is_damage(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:{i:02d},5,1\n" for i in range(30))
    path = written(tmp_path, f"{AZURE}1970-01-01 00:00:00,5,1\n2099-01-01 00:00:00,5,1\n{rows}")
    found = read_requests(path, damaged_max=0.1)
    assert (len(found.rows), found.num_unordered) == (30, 0)
    assert found.rows[-1].at_ns == 29 * NS_PER_S
    with pytest.raises(ConfigError, match=r"line 2: the instant lies 19,\d\d\d days from the med"):
        read_requests(path)


def test_a_line_that_is_too_long_is_dropped(tmp_path: Path) -> None:
    limits = TraceLimits(line_bytes_max=100)
    path = written(tmp_path, MOONCAKE + "{" + "x" * 1000 + "\n" + MOONCAKE * 5)
    found = read_requests(path, damaged_max=0.2, limits=limits)
    assert (len(found.rows), found.drops.num_damaged) == (6, 1)
    with pytest.raises(ConfigError, match="line 2: is longer than 100 bytes"):
        read_requests(path, limits=limits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests: the file is empty"),
        ("\r\n\n", "holds no requests: the file is empty"),
        (AZURE, "holds no requests"),
        ("a,b\n1,2\n", "line 1 with the columns a, b; expected"),
        ('[{"messages": []}]', "a JSON array; expected one object a line"),
        ('"' + "x" * 200_000, r"line 1 with the columns \(none\)"),
        ('{"text": "x"}\n', "line 1 with the fields text; expected"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is no text; expected CSV with a header"),
        ("TIMESTAMP,ContextTokens\n", "lengths without instants"),
        ("model,t0_s,rate_rps\n", "holds rates over time and no requests; a simulation follows"),
        (AZURE.replace("TIMESTAMP", "TIMESTAMP,TIMESTAMP"), "column TIMESTAMP is there twice"),
        ('{"messages": []}\n', "chat transcripts; make sessions of them: prfaas trace import"),
        ('{"block_size": 64, "requests": []}', "holds sessions; the simulator reads them with"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_requests(written(tmp_path, text))


def test_another_format_than_the_one_asked_for_names_the_columns() -> None:
    with pytest.raises(ConfigError, match=r"columns Timestamp, Model.*azure needs TIMESTAMP, Cont"):
        read_requests(DATA / "burstgpt.csv", "azure")
    with pytest.raises(ConfigError, match="no format is called 'azur'; there are mooncake, azure"):
        read_requests(DATA / "azure_2024.csv", "azur")


def test_too_many_requests_or_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"line 5: more than 3 requests.*import a part"):
        read_requests(DATA / "azure_2024.csv", limits=TraceLimits(num_requests_max=3))
    limits = TraceLimits(num_requests_max=5_000, num_block_ids_max=30)
    with pytest.raises(ConfigError, match="or 30 ids of blocks"):
        read_requests(DATA / "mooncake_conversation_40.jsonl", limits=limits)


def test_a_damaged_first_line_does_not_hide_the_format(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for damaged in ("x,y", "{", '{"note": 1}'):
        path.write_text(f"{damaged}\n" + MOONCAKE * 3)
        assert len(read_requests(path, damaged_max=0.3).rows) == 3


@pytest.mark.parametrize("name", ["azure_2024.csv", "burstgpt.csv", "servegen.csv"])
def test_a_plan_reads_the_formats_that_a_simulation_reads(name: str) -> None:
    rows = read_requests(DATA / name).rows
    assert read_trace(DATA / name).new_tokens == tuple(row.num_prompt_tokens for row in rows)
    assert detect(DATA / name) == name.partition("_")[0].removesuffix(".csv")
