"""Completions as chat: the conversion keeps every character, token and number."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prfaas.gateway.openai.requests import (
    Api,
    ChatFromCompletions,
    ClientRequest,
    Relay,
    parse_request,
    replies_for,
)

TEXT = st.text(max_size=8)


def chat_request(**fields: Any) -> ClientRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_request(json.dumps(body).encode(), Api.CHAT, "tiny", 300)


def choice(index: int, text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": None, **more}


def completion(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "tiny",
        "choices": choices,
        **more,
    }


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_whole_answers(texts: list[str]) -> None:
    replies = ChatFromCompletions(chat_request(n=len(texts)), "r")
    choices = [choice(i, text, "length") for i, text in enumerate(texts)]
    answer = replies.whole(completion(choices, usage=USAGE, kv_transfer_params={"x": 1}))
    assert answer["kv_transfer_params"] is None
    chat = ChatCompletion.model_validate(answer, strict=True)
    assert chat.id == "chatcmpl-r"
    assert [c.message.content for c in chat.choices] == texts
    assert [c.index for c in chat.choices] == list(range(len(texts)))
    assert {c.finish_reason for c in chat.choices} == {"length"}
    assert chat.usage is not None
    assert chat.usage.total_tokens == 5


@given(st.lists(st.tuples(st.integers(0, 2), TEXT), min_size=1, max_size=12))
def test_streams(pieces: list[tuple[int, str]]) -> None:
    """Any interleaving: per choice a role first, then exactly its text."""
    replies = ChatFromCompletions(chat_request(n=3, stream=True), "r")
    sent = [
        ChatCompletionChunk.model_validate(out, strict=True)
        for index, text in pieces
        for out in replies.chunks(completion([choice(index, text)]))
    ]
    sent += [
        ChatCompletionChunk.model_validate(out, strict=True)
        for out in replies.chunks(completion([], usage=USAGE))
    ]
    assert sent[-1].choices == []
    for index in range(3):
        deltas = [c.choices[0].delta for c in sent if c.choices and c.choices[0].index == index]
        assert [d.role for d in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        said = "".join(text for i, text in pieces if i == index)
        assert "".join(d.content or "" for d in deltas) == said


def test_continuous_usage_starts_at_none() -> None:
    replies = ChatFromCompletions(chat_request(stream=True), "r")
    opening, first = replies.chunks(completion([choice(0, "a")], usage=USAGE))
    details = {"completion_tokens_details": None}
    none_yet = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert opening["usage"] == none_yet | details
    assert first["usage"] == USAGE | details


def test_the_role_of_a_continued_message() -> None:
    client = chat_request(add_generation_prompt=False, continue_final_message=True)
    answer = ChatFromCompletions(client, "r").whole(completion([choice(0, "a", "stop")]))
    assert answer["choices"][0]["message"]["role"] == "user"


def test_who_converts() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert isinstance(replies_for(chat_request(), "r"), ChatFromCompletions)
    forms: list[dict[str, Any]] = [
        {"tools": [tool]},
        {"tools": []},
        {"tool_choice": "auto"},
        {"reasoning_effort": "low"},
        {"include_reasoning": False},
        {"echo": True},
        {"logprobs": True},
        {"return_token_ids": True},
        {"truncate_prompt_tokens": 5},
    ]
    for fields in forms:
        client = chat_request(**fields)
        assert isinstance(replies_for(client, "r"), Relay), fields
    plain = chat_request(
        tools=None, tool_choice="none", logprobs=False, echo=False, return_token_ids=None
    )
    assert isinstance(replies_for(plain, "r"), ChatFromCompletions)
