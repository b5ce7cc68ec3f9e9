"""Chat answers made from completions have exactly the keys of vLLM's own, null ones included."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.gateway.openai.requests import (
    Api,
    ChatFromCompletions,
    ClientRequest,
    Relay,
    parse_request,
)
from prfaas.gateway.serving.request_state import UsageCorrection
from prfaas.gateway.telemetry.request_records import RequestRecord
from tests.engines.vllm_modules import needing_vllm

chats = needing_vllm("vllm.entrypoints.openai.chat_completion.protocol")
completions = needing_vllm("vllm.entrypoints.openai.completion.protocol")
engine = needing_vllm("vllm.entrypoints.serve.engine.protocol")
base = needing_vllm("vllm.entrypoints.generate.base.protocol")

COUNTS = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}


def shape(value: Any) -> Any:
    """Keys of an object, and whether each is null."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return None if value is None else "value"


def chat_request(**fields: Any) -> ClientRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_request(json.dumps(body).encode(), Api.CHAT, "m", 300)


def usage_of(details: dict[str, int], **more: Any) -> Any:
    return engine.UsageInfo(
        **COUNTS, prompt_tokens_details=engine.PromptTokenUsageInfo(**details), **more
    )


def test_a_whole_chat_has_the_keys_of_vllms() -> None:
    choice = completions.CompletionResponseChoice(index=0, text="a", finish_reason="stop")
    theirs = completions.CompletionResponse(
        model="m", choices=[choice], usage=usage_of({"cached_tokens": 16})
    ).model_dump()
    message = chats.ChatMessage(role="assistant", content="a")
    wanted = chats.ChatCompletionResponse(
        model="m",
        choices=[chats.ChatCompletionResponseChoice(index=0, message=message)],
        usage=usage_of({"cached_tokens": 16, "created_cache_tokens": 80}),
    ).model_dump()
    ours = ChatFromCompletions(chat_request(), "r").whole(theirs)
    usage = UsageCorrection(RequestRecord("r", "chat", "t"), cache_end=96)
    ours["usage"] = usage.corrected(theirs["usage"])
    assert shape(ours) == shape(wanted)
    assert ours["usage"] == wanted["usage"]


@pytest.mark.parametrize("continuous", [False, True])
def test_a_streamed_chat_has_the_keys_of_vllms(continuous: bool) -> None:
    """Built as vLLM's two stream generators do, key by key."""
    counts = engine.UsageInfo(**COUNTS)
    head = {"id": "x", "created": 1, "model": "m"}
    theirs = [
        _sent(
            completions.CompletionStreamResponse(
                **head,
                object="text_completion",
                choices=[
                    completions.CompletionResponseStreamChoice(
                        index=0,
                        text="a",
                        logprobs=None,
                        finish_reason=reason,
                        stop_reason=None,
                        prompt_token_ids=None,
                        token_ids=None,
                    )
                ],
            ),
            counts if continuous else None,
        )
        for reason in (None, "stop")
    ]

    def chunk(choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        made = chats.ChatCompletionStreamResponse(
            **head,
            object="chat.completion.chunk",
            choices=[chats.ChatCompletionResponseStreamChoice(index=0, **choice)],
            **more,
        )
        usage = engine.UsageInfo(**COUNTS, completion_tokens_details=None)
        return _sent(made, usage if continuous else None)

    opening, text = base.DeltaMessage(role="assistant", content=""), base.DeltaMessage(content="a")
    rest = {"logprobs": None, "token_ids": None}
    wanted = [
        chunk(
            {"delta": opening, "logprobs": None, "finish_reason": None},
            prompt_token_ids=None,
            prompt_text=None,
        ),
        chunk({"delta": text, "finish_reason": None, **rest}),
        chunk({"delta": text, "finish_reason": "stop", "stop_reason": None, **rest}),
    ]
    replies = ChatFromCompletions(chat_request(stream=True), "r")
    ours = [out for each in theirs for out in replies.chunks(each)]
    assert [shape(each) for each in ours] == [shape(each) for each in wanted]


def _sent(chunk: Any, usage: Any) -> dict[str, Any]:
    """A chunk as vLLM sends it, with continuous usage or without."""
    if usage is not None:
        chunk.usage = usage
    sent: dict[str, Any] = json.loads(chunk.model_dump_json(exclude_unset=True))
    return sent


def test_a_completion_keeps_all_keys_and_no_transfer_parameters() -> None:
    theirs = completions.CompletionResponse(
        model="m", choices=[], usage=usage_of({"cached_tokens": 16}), kv_transfer_params={"a": 1}
    ).model_dump()
    ours = Relay("cmpl-", "r").whole(theirs)
    assert ours.keys() == theirs.keys()
    assert ours["kv_transfer_params"] is None
    usage = UsageCorrection(RequestRecord("r", "completions", "t"), cache_end=96)
    assert usage.corrected(theirs["usage"]) == theirs["usage"]


def test_what_was_created_is_what_was_not_cached_before() -> None:
    """Decode found 64 tokens more than were cached when the request came: it created them."""
    found = {"cached_tokens": 80, "created_cache_tokens": 16}
    by_chat_endpoint = UsageCorrection(RequestRecord("r", "chat", "t"), cached_max=16, cache_end=96)
    counts = usage_of(found).model_dump()
    details = by_chat_endpoint.corrected(counts)["prompt_tokens_details"]
    assert (details["cached_tokens"], details["created_cache_tokens"]) == (16, 80)


def test_a_stream_has_no_null_details() -> None:
    record = RequestRecord("r", "completions", "t", stream=True)
    details = UsageCorrection(record).corrected(COUNTS)["prompt_tokens_details"]
    assert details == {"cached_tokens": 0}


def test_the_last_whole_block_of_several_groups() -> None:
    groups = (
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1),
        CacheGroup(1, GroupKind.LINEAR_STATE, 48, 1),
    )
    layout = Layout(bytes(32), 16, "0", groups)
    ends = [layout.last_whole_block(num_tokens) for num_tokens in (15, 47, 48, 95, 96, 111)]
    assert ends == [0, 0, 48, 48, 96, 96]
