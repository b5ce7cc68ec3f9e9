"""JSON bodies as vLLM writes them.

References:
    vLLM 0.32, `entrypoints/openai`: `completion/protocol.py`, `chat_completion/protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prfaas.engines.timing.api.bodies import Body
from prfaas.engines.timing.api.choices import AnswerChoice

Json = dict[str, Any]


def error_body(message: str, error_type: str, param: str | None, status: int) -> Json:
    """An error."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": status}}


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int = 0

    def counts(self) -> Json:
        """Without details, as chunks of a stream have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def whole(self) -> Json:
        """Usage with details."""
        cached = {"cached_tokens": self.cached_tokens} if self.cached_tokens else None
        return self.counts() | {"prompt_tokens_details": cached}


class Replies:
    """Replies to one request.

    Args:
        created: Seconds since 1970.
        prompts: Token ids of every prompt.
        chat: True if it is a chat.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        body: Body,
        prompts: list[list[int]],
        *,
        chat: bool,
    ) -> None:
        self._chat, self._body, self._prompts = chat, body, prompts
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._head = {"id": prefix + request_id, "created": created, "model": model}
        self._is_opened = False

    def whole(self, choices: list[AnswerChoice], usage: Usage) -> Json:
        """The complete answer."""
        kind = "chat.completion" if self._chat else "text_completion"
        reply = {**self._head, "object": kind, "usage": usage.whole()}
        if self._chat and self._body.return_token_ids:
            reply["prompt_token_ids"] = self._prompts[0]
        return reply | {
            "choices": [
                self._whole_chat(choice) if self._chat else self._whole_text(choice)
                for choice in choices
            ],
            "kv_transfer_params": None,
        }

    def chunks(self, changed: list[AnswerChoice], usage: Usage) -> list[Json]:
        """Chunks of a stream for choices that have grown."""
        chunks: list[Json] = []
        first = not self._is_opened
        if self._chat and first:
            chunks += [self._chunk([self._opening(choice.index)], usage) for choice in changed]
        self._is_opened = True
        for choice in changed:
            entry = self._delta(choice)
            if first and not self._chat and self._body.return_token_ids:
                entry["prompt_token_ids"] = self._prompt_of(choice)
            chunks.append(self._chunk([entry], usage))
        if first and self._chat and self._body.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._prompts[0]
        return chunks

    def last(self, usage: Usage) -> Json:
        """The chunk with the usage of the whole request."""
        return self._chunk([], usage) | {"usage": usage.whole()}

    def _chunk(self, choices: list[Json], usage: Usage) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._head, "object": kind, "choices": choices}
        return chunk | ({"usage": usage.counts()} if self._body.continuous_usage else {})

    def _opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, choice: AnswerChoice) -> Json:
        text, tokens = choice.take()
        entry: Json = {"index": choice.index}
        if self._chat:
            entry |= {"delta": {"content": text}, "logprobs": choice.chat_logprobs(tokens)}
        else:
            entry |= {"text": text, "logprobs": choice.completion_logprobs(tokens)}
        entry |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return entry | self._ids(tokens)

    def _whole_chat(self, choice: AnswerChoice) -> Json:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": choice.chat_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice.tokens),
        }

    def _whole_text(self, choice: AnswerChoice) -> Json:
        entry = {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.completion_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._ids(choice.tokens),
        }
        if self._body.return_token_ids:
            entry["prompt_token_ids"] = self._prompt_of(choice)
        return entry

    def _prompt_of(self, choice: AnswerChoice) -> list[int]:
        return self._prompts[choice.index // (self._body.n or 1)]

    def _ids(self, tokens: list[int]) -> Json:
        return {"token_ids": tokens} if self._body.return_token_ids else {}
