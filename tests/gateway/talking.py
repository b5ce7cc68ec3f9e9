"""Engines that say the same text, token by token, wherever they are asked to begin."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers.decoders import DecodeStream

from prfaas.core.resilience.budgets import Budget, BudgetSettings
from prfaas.core.resilience.circuit_breaker import Breaker, BreakerSettings

from .conftest import World
from .scripted_engine import Call, ScriptedEngine, send


@dataclass
class Speech:
    """The text of all engines of a test, streamed as vLLM 0.32 does.

    Attributes:
        tokenizer: Of `transformers`.
        text: The whole answer.
        dies: After how many events each of the next streams breaks; those after them do not.
        how: What breaking is.
        with_ids: Whether token ids are told when asked for.
        cached: Tokens that each engine finds in its cache.
    """

    tokenizer: Any
    text: str
    dies: list[int] = field(default_factory=list)
    how: str = "abort"
    with_ids: bool = True
    cached: int = 16
    prompt: list[int] | None = None
    """Of the first request, by which the engines know how far they are."""

    @classmethod
    def of(cls, checkpoint: Path, text: str, **more: Any) -> Speech:
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(checkpoint), text, **more)

    @property
    def ids(self) -> list[int]:
        return list(self.tokenizer.encode(self.text, add_special_tokens=False))

    async def script(
        self, engine: ScriptedEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        prompt = body["prompt"]
        if len(prompt) == 1:
            return await engine.answer(request, body)  # A rehearsal.
        self.prompt = self.prompt or prompt
        assert prompt[: len(self.prompt)] == self.prompt
        assert prompt[len(self.prompt) :] == self.ids[: len(prompt) - len(self.prompt)]
        lines = self.lines(body)
        if not body.get("stream"):
            return web.json_response(self.whole(lines))
        response = await engine.begin_stream(request)
        dies = self.dies.pop(0) if self.dies else None
        for line in lines[:dies]:
            await send(response, line)
        if dies is None:
            await response.write(b"data: [DONE]\n\n")
            return response
        if self.how == "error":
            error = {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}
            await send(response, {"error": error})
            await response.write(b"data: [DONE]\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    def lines(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream: one a token, and the usage."""
        prompt, stops = body["prompt"], body.get("stop") or []
        hold = max(map(len, stops), default=1) - 1
        assert self.prompt is not None
        rest = self.ids[len(prompt) - len(self.prompt) :]
        stream, text, told, lines = DecodeStream(ids=prompt), "", 0, []
        head = {"id": "cmpl-x", "object": "text_completion", "created": len(prompt), "model": "m"}
        for number, token in enumerate(rest, 1):
            text += stream.step(self.tokenizer._tokenizer, token) or ""
            stop = next((stop for stop in stops if stop in text), None)
            reason = "stop" if stop or number == len(rest) else None
            if reason is None and number == body.get("max_tokens"):
                reason = "length"
            if stop:
                text = text[: text.index(stop)]
            end = len(text) if reason else max(told, len(text) - hold)
            choice = {"index": 0, "text": text[told:end], "logprobs": None, "stop_reason": stop}
            told = end
            choice["finish_reason"] = reason
            if body.get("return_token_ids") and self.with_ids:
                choice["token_ids"] = [token]
                choice["prompt_token_ids"] = prompt if number == 1 else None
            if body.get("return_tokens_as_token_ids") and self.with_ids:
                # Of a prefill leg, whose client hears nothing of log probabilities.
                choice["logprobs"] = {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5]}
            line = head | {"choices": [choice]}
            usage = self.usage(prompt, number)
            if (body.get("stream_options") or {}).get("continuous_usage_stats"):
                line["usage"] = usage
            lines.append(line)
            if reason:
                break
        cached = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return [*lines, head | {"choices": [], "usage": usage | cached}]

    @staticmethod
    def whole(lines: list[dict[str, Any]]) -> dict[str, Any]:
        """All events of a stream as one answer."""
        choices = [line["choices"][0] for line in lines if line["choices"]]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        text = "".join(choice["text"] for choice in choices)
        told: dict[str, Any] = {"token_ids": ids} if ids else {}
        if choices[0]["logprobs"]:
            tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
            told["logprobs"] = {"tokens": tokens}
        return lines[-1] | {"choices": [choices[-1] | {"text": text} | told]}

    @staticmethod
    def usage(prompt: list[int], num_tokens: int) -> dict[str, Any]:
        counts = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        return counts | {"total_tokens": sum(counts.values())}


def patient(world: World) -> None:
    """Let engines fail as often as a test wants."""
    guards = world.gateway.guards
    world.gateway.fleet.retries = Budget(BudgetSettings(0, 0, 1000))
    for target in guards.breakers:
        guards.breakers[target] = Breaker(BreakerSettings(failures_max=1000, outcomes_min=1000))


async def stream(world: World, body: dict[str, Any]) -> list[dict[str, Any]]:
    path = "chat/completions" if "messages" in body else "completions"
    async with world.http.post(f"{world.url}/v1/{path}", json=body) as response:
        assert response.status == 200, await response.text()
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event.get("choices", [])]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def usage_of(events: list[dict[str, Any]]) -> tuple[int, int, int]:
    usage = events[-1]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


async def ask(world: World, body: dict[str, Any]) -> tuple[str, dict[str, Any], Any, Any]:
    """Text, counts and end of an answer, streamed or not."""
    if body.get("stream"):
        events = await stream(world, body)
        last = next(e["choices"][0] for e in reversed(events) if e["choices"])
        return text_of(events), events[-1]["usage"], last["finish_reason"], last["stop_reason"]
    status, reply = await world.post(body)
    assert status == 200, reply
    [choice] = reply["choices"]
    return choice["text"], reply["usage"], choice["finish_reason"], choice["stop_reason"]


def kv_orders(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = (call.body.get("kv_transfer_params") or {}).get("prfaas", {})
    return found
