"""The small parts: events, messages, bodies, salt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.errors import ConfigError, EngineError
from prfaas.gateway.http.json_codec import is_deeper_than, num_containers
from prfaas.gateway.http.responses import EventDecoder, encode_event
from prfaas.gateway.openai.messages import for_template, has_other_parts, parse_messages
from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.serving.leg_requests import decode_body
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=2)), st.integers(1, 9))
def test_events_survive_any_cut(values: list[dict[str, str]], step: int) -> None:
    stream = b": comment\n\n" + b"".join(map(encode_event, values))
    decoder = EventDecoder()
    events = [
        json.loads(event)
        for start in range(0, len(stream), step)
        for event in decoder.feed(stream[start : start + step])
    ]
    assert events == values


def test_events_with_carriage_returns_and_several_lines() -> None:
    assert EventDecoder().feed(b"event: x\r\ndata: a\r\ndata:b\r\n\r\n\r\n") == [b"a\nb"]


@pytest.mark.parametrize("data", [b"data: " + b"x" * 100, b"data: 12345678901\n" * 10])
def test_a_runaway_event_is_cut_off(data: bytes) -> None:
    with pytest.raises(EngineError, match="more than 50 bytes"):
        EventDecoder(50).feed(data)


@pytest.mark.parametrize(
    ("message", "parsed"),
    [
        ({"role": "user", "content": "a", "x": 1}, {"role": "user", "content": "a"}),
        ({"role": "user"}, {"role": "user", "content": ""}),
        (
            {"role": "tool", "content": None, "tool_call_id": "t", "name": "n"},
            {"role": "tool", "content": "", "tool_call_id": "t", "name": "n"},
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            {"role": "user", "content": "a\nb"},
        ),
        (
            {"role": "assistant", "reasoning_content": "r", "tool_calls": []},
            {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"},
        ),
    ],
)
def test_messages(message: dict[str, Any], parsed: dict[str, Any]) -> None:
    found = for_template(parse_messages([message]), knows_developer=True, takes_parts=False)
    assert found == [parsed]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ("[1]", {}), ("{", {}), ({"b": 2}, {"b": 2})],
)
def test_tool_arguments(arguments: object, parsed: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": parsed}
    assert call["function"] == {"name": "f", "arguments": arguments}


def test_other_parts() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image_url"}
    assert not has_other_parts([{"content": [text, "b"]}, {"content": "c"}, {}])
    assert has_other_parts([{"content": [text]}, {"content": [text, image]}])


def test_depth() -> None:
    assert not is_deeper_than({"a": [[1], {"b": 2}]}, 3)
    assert is_deeper_than({"a": [[1], {"b": 2}]}, 2)
    assert not is_deeper_than("text", 0)


def test_arrays_and_objects_are_counted_outside_of_strings() -> None:
    assert num_containers(rb'{"a[": [1, "[\"", {"b": "\\"}], "{\"[": []}') == 4
    assert num_containers(b'"[[["') == 0


def test_chat_in_the_words_of_completions() -> None:
    """Fields of both APIs are kept; fields of chat alone are translated or left out."""
    kept = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["x"],
        "seed": 7,
        "n": 2,
        "logit_bias": {"5": 1.0},
        "presence_penalty": 0.1,
        "response_format": {"type": "json_object"},
        "min_tokens": 1,
        "ignore_eos": True,
        "user": "u",
    }
    body = kept | {
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": False,
        "top_logprobs": 0,
        "max_completion_tokens": 9,
        "max_tokens": 5,
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"a": 1},
    }
    client = parse_request(json.dumps(body).encode(), Api.CHAT, "tiny", 300)
    path, sent = decode_body(
        client, EncodedPrompt([[1, 2, 3]], [], "s"), max_model_len=100, transfer=None
    )
    assert path == "/v1/completions"
    assert sent == kept | {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "cache_salt": "s",
    }


def test_the_salt_is_made_once(tmp_path: Path) -> None:
    state = tmp_path / "a" / "b"
    secret = deployment_secret(state)
    assert deployment_secret(state) == secret
    assert deployment_secret(tmp_path / "other") != secret
    assert (state / "tenant.salt").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.iterdir()] == ["tenant.salt"]


def test_every_tenant_has_a_salt_of_its_own_that_vllm_takes(tmp_path: Path) -> None:
    secret = deployment_secret(tmp_path)
    salts = {salt_of(secret, name) for name in ("a", "b", "default")}
    salts.add(salt_of(secret + b"x", "a"))
    assert len(salts) == 4
    assert salt_of(secret, "a") in salts
    assert secret.decode() not in salts
    salt = salts.pop()
    # What vLLM takes as a salt: at most 128 characters, none of these.
    assert len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


@pytest.mark.parametrize("content", ["", "short", "\xff\xfe"])
def test_a_damaged_salt_is_the_operators_to_mend(tmp_path: Path, content: str) -> None:
    (tmp_path / "tenant.salt").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"tenant\.salt"):
        deployment_secret(tmp_path)


def test_a_state_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        deployment_secret(tmp_path / "file")
