"""Chat transcripts become sessions: lengths, common prefixes and pauses, and no text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from prfaas.core.cache.prefix_cache import PrefixCache
from prfaas.errors import ConfigError
from prfaas.planner.workload import read_trace
from prfaas.sim.workloads.make import with_followers
from prfaas.sim.workloads.sessions import Sessions
from prfaas.traces.checks import TraceLimits
from prfaas.traces.sessions.block_chain import TextUnits, characters, tokens_of
from prfaas.traces.sessions.chats import (
    EMPTY,
    NOT_TEXT,
    REPEATED,
    UNANSWERED,
    UNTIMED,
    Chats,
    read_chats,
)
from prfaas.traces.sessions.session_file import Session, read_sessions, session_lines, write_lines
from prfaas.units import NS_PER_S

ONE = characters(1)
"""A character a token: lengths can be counted by eye. Every message has 4 tokens of markers."""
SYSTEM = "s" * 196  # 200 tokens: 3 blocks of 64, and 8 tokens


def chat(*texts: str, **fields: object) -> dict[str, Any]:
    """System prompt, then user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": SYSTEM}, *messages], **fields}


def read(tmp_path: Path, lines: Sequence[object], units: TextUnits = ONE, **options: Any) -> Chats:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_chats(path, units, **options)


def sessions(tmp_path: Path, chats: Chats, pause_s: float = 7.0) -> tuple[Session, ...]:
    path = tmp_path / "sessions.jsonl.gz"
    write_lines(path, session_lines(chats, pause_s))
    return read_sessions(path)


def test_every_answer_is_a_request_whose_prompt_is_all_before_it(tmp_path: Path) -> None:
    (session,) = sessions(tmp_path, read(tmp_path, [chat("q" * 16, "a" * 46, "r" * 36, "b" * 9)]))
    first, second = session.turns
    assert (first.num_prompt_tokens, first.num_output_tokens) == (200 + 20, 46)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (200 + 20 + 50 + 40, 9)
    assert (first.after, second.after, second.think_s) == (None, 0, 7.0)
    # 220 tokens are 3 whole blocks and a part; 310 are the same 3, one more, and a part.
    assert first.runs[0] == (0, 3)
    assert second.runs[0] == (0, 4)
    assert [sum(count for _, count in turn.runs) for turn in session.turns] == [4, 5]


def test_sessions_with_one_system_prompt_share_its_blocks_and_no_others(tmp_path: Path) -> None:
    chats = read(
        tmp_path,
        [chat("x" * 300, "a"), chat("y" * 300, "a"), {"messages": chat("z", "a")["messages"][1:]}],
    )
    found = sessions(tmp_path, chats)
    assert [session.shared for session in found] == [((0, 3),), ((0, 3),), ()]
    roots = Sessions(found, 10**6 * NS_PER_S, 64, rate_per_s=1e-4).requests(1)
    ids = [set(r.block_ids) for r in with_followers(roots)]
    long = [each for each in ids if len(each) > 1]
    assert len(long) > 20
    # Also a session that is used twice shares its system prompt with itself, and nothing else.
    common = set.intersection(*long)
    assert len(common) == 3
    assert all(a & b == common for a in long for b in long if a is not b)


def test_a_simulation_has_the_prefix_hits_that_a_plan_has(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    lines = [chat(f"{i:03d}" * 100, "a" * 90, "r" * 50, "b") for i in range(40)]
    write_lines(path, session_lines(read(tmp_path, lines), 1.0))
    source = Sessions(read_sessions(path), 10**6 * NS_PER_S, 64, rate_per_s=1e-4)
    cache, hit, total = PrefixCache(), 0, 0
    for request in with_followers(source.requests(1)):
        hit += min(cache.usable_hit(request.block_ids) * 64, request.num_prompt_tokens)
        total += request.num_prompt_tokens
        cache.store(request.block_ids)
    planned = read_trace(path)
    assert planned.prefix_hit_ratio > 0.5
    assert hit / total == pytest.approx(planned.prefix_hit_ratio, abs=0.02)


def test_prompts_that_part_within_a_message_share_what_is_before(tmp_path: Path) -> None:
    long = "l" * 1000
    chats = read(tmp_path, [chat(long, "a"), chat(long[:500] + "m" * 500, "a"), chat(long, "b")])
    one, two, three = (turns[0].runs for turns in chats.sessions)
    # 200 + 4 + 500 tokens are 11 blocks.
    assert one[0] == (0, 18)
    assert two[0] == (0, 11)
    assert three == one


def test_roles_and_the_ends_of_messages_part_prompts(tmp_path: Path) -> None:
    def line(*messages: tuple[str, str]) -> dict[str, object]:
        parts = [{"role": role, "content": text} for role, text in messages]
        return {"messages": [*parts, {"role": "assistant", "content": "a"}]}

    chats = read(
        tmp_path,
        [
            line(("user", "x" * 200)),
            line(("tool", "x" * 200)),
            line(("user", "x" * 10), ("user", "x" * 186)),
        ],
    )
    assert len({turns[0].runs[0][0] for turns in chats.sessions}) == 3


def test_lengths_are_those_of_the_models_tokenizer(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(10)} | {"?": 10}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    line = {
        "messages": [
            {"role": "user", "content": "w1 w2 w3 é"},
            {"role": "assistant", "content": "w4 w5"},
        ]
    }
    chats = read(tmp_path, [line], tokens_of(tmp_path))
    ((turn,),) = chats.sessions
    assert (turn.num_prompt_tokens, turn.num_output_tokens) == (4 + 4, 2)
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        tokens_of(tmp_path / "missing")


def test_characters_make_about_as_many_tokens_as_stated(tmp_path: Path) -> None:
    ((turn,),) = read(tmp_path, [chat("é" * 3600, "a" * 37)], characters(3.7)).sessions
    assert turn.num_output_tokens == 10
    assert turn.num_prompt_tokens == pytest.approx((196 + 3600) / 3.7 + 8, rel=0.002)


def test_forms_of_transcripts_mean_the_same(tmp_path: Path) -> None:
    plain = [
        {"role": "system", "content": "You answer."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    whole: list[dict[str, object]] = [
        {"messages": plain},
        {"messages": plain[1:], "system": "You answer."},
        {"conversation": plain, "model": "m", "turn": 2},
        {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in plain]},
    ]
    expected = read(tmp_path, whole[:1]).sessions
    for line in whole:
        assert read(tmp_path, [line]).sessions == expected
    # A message a line, itself or as agents log it; what belongs to no session is one session.
    assert read(tmp_path, plain).sessions == expected
    logged = [{"sessionId": "s", "type": "x", "message": m} for m in plain]
    assert read(tmp_path, [{"type": "summary"}, *logged]).sessions == expected
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    share = [{"from": names[m["role"]], "value": m["content"]} for m in plain]
    ((first, second),) = read(tmp_path, [{"conversations": share}]).sessions
    assert [first.num_prompt_tokens, second.num_prompt_tokens] == [
        turn.num_prompt_tokens for turn in expected[0]
    ]


def test_agents_are_read_with_tools_results_reasoning_and_images(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "h" * 30, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "tool_result", "content": [{"text": "r" * 11}]}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "h" * 5}, "done"]},
    ]
    chats = read(tmp_path, [{"messages": messages, "tools": [{"name": "ls"}]}])
    ((first, second),) = chats.sessions
    called = len('{"name":"ls","arguments":"{}"}')
    assert first.num_prompt_tokens == 4 + len('[{"name":"ls"}]') + 4
    assert first.num_output_tokens == 30 + called
    # Reasoning is no part of later prompts.
    assert second.num_prompt_tokens == first.num_prompt_tokens + 4 + called + 4 + 11
    assert second.num_output_tokens == 5 + 4
    assert chats.notes[NOT_TEXT] == 1


def test_pauses_and_starts_come_from_the_instants_of_messages(tmp_path: Path) -> None:
    def line(*at: object) -> dict[str, object]:
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": "x", "timestamp": when}
            for i, when in enumerate(at)
        ]
        return {"messages": messages}

    chats = read(
        tmp_path,
        [
            line("2025-01-01T00:01:00Z", "2025-01-01T01:01:04+01:00", "2025-01-01T00:01:30", None),
            line(1_735_689_600, 1_735_689_602.5, 1_735_689_600_000 + 9_000, 1_735_689_610),
            line(1_735_689_600 + 5, 1_735_689_600 + 2, None, "soon"),
        ],
    )
    found = sessions(tmp_path, chats)
    assert [session.start_s for session in found] == [60, 0, 5]
    assert [session.turns[1].think_s for session in found] == [26, 6.5, 7]
    assert [session.turns[1].at_s for session in found] == [30, 9, 7]
    assert chats.notes[UNTIMED] == 1


def test_a_log_that_repeats_the_session_counts_every_answer_once(tmp_path: Path) -> None:
    whole = chat("1", "2", "3", "4", "5", "6", "7")["messages"]
    lines = [{"session_id": "s", "messages": whole[: 1 + n]} for n in (2, 4, 5, 6, 7)]
    chats = read(tmp_path, lines)
    ((*turns,),) = chats.sessions
    assert [turn.num_prompt_tokens for turn in turns] == [205, 215, 225]
    assert chats.notes[REPEATED] == 1 + 2 + 2 + 3
    assert chats.notes[UNANSWERED] == 2


def test_sessions_that_give_no_request_are_counted(tmp_path: Path) -> None:
    alone = {"messages": [{"role": "assistant", "content": "hello"}]}
    chats = read(tmp_path, [chat("q", "a"), {"messages": []}, alone])
    assert len(chats.sessions) == 1
    assert chats.notes[EMPTY] == 2


def test_answers_in_several_messages_are_one(tmp_path: Path) -> None:
    parts = [("user", "q"), ("assistant", "a" * 10), ("assistant", "b" * 10), ("user", "r")]
    messages = [{"role": role, "content": text} for role, text in parts]
    ((turn,),) = read(tmp_path, [{"messages": messages}]).sessions
    assert turn.num_output_tokens == 20


def test_no_text_and_no_name_is_written(tmp_path: Path) -> None:
    secret = "SwordfishSwordfish"
    line = chat(secret * 40, secret, id="customer-4711") | {"tools": [{"name": secret}]}
    out = []
    for name in ("a.jsonl", "b.jsonl"):
        path = tmp_path / name
        write_lines(path, session_lines(read(tmp_path, [line, line]), 1.0))
        out.append(path.read_bytes())
    # Blocks are numbered: not even a hash is left to guess texts with.
    assert out[0] == out[1]
    for word in (b"wordfish", b"4711", secret.encode().hex().encode()):
        assert word not in out[0]
    assert {*out[0].decode()} <= set('{}[]":,.\n') | set("0123456789") | set(
        "idblock_sizerequestsharedoutapinkh"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": [3]}, "a message is no object"),
        ({"messages": [{"content": "x"}]}, "a message has no role"),
        ({"messages": [{"role": "u" * 99, "content": "x"}]}, "a message has no role"),
        ({"messages": [{"role": "user", "content": 7}]}, "neither text nor a list of parts"),
        ({"messages": [{"role": "user", "content": [[[[[[[[[["x"]]]]]]]]]]}]}, "neither text nor"),
        ("text", "Expected `object`"),
    ],
)
def test_a_damaged_transcript_is_dropped_and_its_text_not_shown(
    tmp_path: Path, line: object, message: str
) -> None:
    good = [chat("q", "a")] * 9
    with pytest.raises(ConfigError, match=f"line 1: .*{message}"):
        read(tmp_path, [line, *good])
    chats = read(tmp_path, [line, *good], damaged_max=0.1)
    assert (len(chats.sessions), chats.drops.num_damaged) == (9, 1)
    with pytest.raises(ConfigError, match=r"1 of 10 lines are damaged, more than 9\.00%"):
        read(tmp_path, [line, *good], damaged_max=0.09)


def test_text_of_a_broken_line_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "my secret')
    with pytest.raises(ConfigError) as raised:
        read_chats(path, ONE)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"other": 1}], r"holds no answer of a model \(no messages\)"),
        ([chat("q")], "prompts without an answer"),
        ([{"messages": []}], "holds no answer"),
        ([{"messages": [{"role": "assistant", "content": "hello"}]}], "holds no answer"),
    ],
)
def test_transcripts_without_an_answer_are_refused(
    tmp_path: Path, lines: list[object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, lines)


def test_what_is_too_long_ends_its_session_only(tmp_path: Path) -> None:
    limits = TraceLimits(num_prompt_tokens_max=400)
    lines = [chat("q", "a", "x" * 500, "a"), chat("q", "a")]
    chats = read(tmp_path, lines, damaged_max=0.6, limits=limits)
    assert [len(turns) for turns in chats.sessions] == [1, 1]
    (reason,) = chats.drops.reasons
    assert reason == "the rest of a session that is too long"
    with pytest.raises(ConfigError, match="more than 3 different blocks; import a part"):
        read(tmp_path, [chat("q" * 300, "a")], limits=TraceLimits(num_chat_blocks_max=3))


def test_reading_ends_with_the_requests_that_were_asked_for(tmp_path: Path) -> None:
    assert read(tmp_path, [chat("q", "a", "r", "b")] * 9, num_requests=5).num_requests == 6


def test_a_plan_has_the_prefix_hits_of_sessions(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    lines = [chat("q" * 300, "a" * 100, "r" * 64, "b"), chat("p" * 300, "a")]
    write_lines(path, session_lines(read(tmp_path, lines), 1.0))
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 2
    lengths = read_trace(path)
    prompts = [504, 504 + 104 + 68, 504]
    hits = [0, 448, 192]  # of the second turn 7 blocks, of the other session the system prompt's 3
    assert sorted(lengths.new_tokens) == sorted(p - h for p, h in zip(prompts, hits, strict=True))
