"""Engine answers in the client's words.

Every answer and chunk of an engine passes through one of the `Replies`: `Relay` where engine and
client speak the same API, `ChatFromCompletions` where the gateway rendered the chat template itself
and the engine only ever saw a completion.
"""

from __future__ import annotations

from prfaas.gateway.http.json_codec import JsonObject, as_object
from prfaas.gateway.openai.requests import Api, ClientRequest

_PRIVATE_KEYS = ("kv_transfer_params", "ec_transfer_params")
_WHOLE_CHAT_NULLS = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
_FIRST_CHUNK_NULLS = {"prompt_token_ids": None, "prompt_text": None}
"""Keys of vLLM's chat answers that no completion has. A request that fills one goes to the engine's
chat endpoint."""


class Relay:
    """Same API on both sides: ids change, and transfer parameters become null."""

    def __init__(self, prefix: str, request_id: str) -> None:
        self._id = prefix + request_id

    def whole(self, answer: JsonObject) -> JsonObject:
        """A complete answer."""
        return answer | _without_private(answer) | {"id": self._id}

    def chunks(self, chunk: JsonObject) -> list[JsonObject]:
        """A chunk of a stream: what to send for it, in order."""
        return [self.whole(chunk)]


class ChatFromCompletions:
    """Completion objects as chat objects, as vLLM's chat endpoint writes them.

    Log probabilities are none of them: a completion lists the most likely tokens by their text, and
    two of one text are one there.

    References:
        vLLM 0.32, `entrypoints/openai/chat_completion/serving.py`.
    """

    def __init__(self, client: ClientRequest, request_id: str) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._num_choices = client.num_choices
        renders_turn = client.body.get("add_generation_prompt") is not False
        self._role = client.answer_role if renders_turn else client.messages[-1]["role"]
        self._opened = False

    def whole(self, answer: JsonObject) -> JsonObject:
        """A complete answer."""
        head = answer | _without_private(answer) | _WHOLE_CHAT_NULLS
        choices = [self._choice(choice) for choice in answer.get("choices", [])]
        return head | {"id": self._id, "object": "chat.completion", "choices": choices}

    def chunks(self, chunk: JsonObject) -> list[JsonObject]:
        """A chunk of a stream. The first one is preceded by one with the role for every choice."""
        head = chunk | {"id": self._id, "object": "chat.completion.chunk"}
        if chunk.get("choices") and "usage" in chunk:
            head["usage"] = as_object(chunk["usage"]) | {"completion_tokens_details": None}
        out = [head | {"choices": [self._delta(choice) for choice in chunk.get("choices", [])]}]
        if not self._opened and chunk.get("choices"):
            self._opened = True
            return [*self._openings(head), *out]
        return out

    def _openings(self, head: JsonObject) -> list[JsonObject]:
        if usage := as_object(head.get("usage")):
            prompt_tokens = usage.get("prompt_tokens", 0)
            none_yet = {"completion_tokens": 0, "total_tokens": prompt_tokens}
            head = head | {"usage": usage | none_yet}
        delta = {"role": self._role, "content": ""}
        opening = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [
            head | _FIRST_CHUNK_NULLS | {"choices": [{"index": index, **opening}]}
            for index in range(self._num_choices)
        ]

    def _choice(self, choice: JsonObject) -> JsonObject:
        return {
            "index": choice.get("index", 0),
            "message": {
                "role": self._role,
                "content": choice.get("text", ""),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": choice.get("finish_reason") or "stop",
            "stop_reason": choice.get("stop_reason"),
            "token_ids": None,
            "routed_experts": choice.get("routed_experts"),
        }

    def _delta(self, choice: JsonObject) -> JsonObject:
        delta = {
            "index": choice.get("index", 0),
            "delta": {"content": choice.get("text", "")},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
            "token_ids": None,
        }
        if choice.get("finish_reason") is not None:
            delta["stop_reason"] = choice.get("stop_reason")
        return delta


Replies = Relay | ChatFromCompletions


def replies_for(client: ClientRequest, request_id: str) -> Replies:
    """The conversion of the answers to a request."""
    if client.api is Api.CHAT and not client.by_chat_endpoint:
        return ChatFromCompletions(client, request_id)
    return Relay("chatcmpl-" if client.api is Api.CHAT else "cmpl-", request_id)


def _without_private(answer: JsonObject) -> JsonObject:
    """Null for everything that is between the gateway and its engines."""
    return {key: None for key in _PRIVATE_KEYS if key in answer}
