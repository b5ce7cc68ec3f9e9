"""One request to an instance: from a checked body to growing answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from prfaas.engines.orders import Order, read_order
from prfaas.engines.timing.api.bodies import DEFAULT_MAX_TOKENS, Body, prompts_of
from prfaas.engines.timing.api.choices import AnswerChoice
from prfaas.engines.timing.api.replies import Usage
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer
from prfaas.engines.timing.instance import PromptWork, TimedInstance
from prfaas.errors import RequestError
from prfaas.tasks import cancel_all

OWN_TOKENS = 512
"""Length of an answer that may be as long as the context leaves room for: as those of models, it
ends by itself."""


class AnswerGeneration:
    """The answers to one body.

    Args:
        vocabulary: Texts of tokens.
        prompts: Token ids of every prompt.
        num_tokens_max: Longest answer, by prompt.
        interval: Tokens between two looks.
    """

    def __init__(
        self,
        instance: TimedInstance,
        vocabulary: Vocabulary,
        body: Body,
        request_id: str,
        prompts: list[list[int]],
        num_tokens_max: list[int],
        interval: int,
    ) -> None:
        self._instance, self._vocabulary, self._body = instance, vocabulary, body
        takes_orders = instance.layout.takes_orders and len(prompts) == 1
        order = order_of(body) if takes_orders else None
        streams = body.stream or body.stops or body.stop_token_ids
        self._works = [
            PromptWork(
                request=f"{request_id}-{number}",
                tokens=tokens,
                num_output_max=most,
                width=body.n or 1,
                cache_salt=body.cache_salt,
                order=order,
                interval=interval if streams else most,
            )
            for number, (tokens, most) in enumerate(zip(prompts, num_tokens_max, strict=True))
        ]
        self.choices: list[AnswerChoice] = []
        self._grown: asyncio.Queue[list[AnswerChoice] | BaseException | None] = asyncio.Queue()
        self.started = time.monotonic()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            sum(len(work.tokens) for work in self._works),
            sum(work.cached_tokens for work in self._works),
            sum(len(choice.tokens) for choice in self.choices),
        )

    async def run(self) -> AsyncIterator[list[AnswerChoice]]:
        """Generate the answers.

        Yields:
            Choices that have new tokens.
        """
        tasks = [asyncio.create_task(self._work(n, work)) for n, work in enumerate(self._works)]
        try:
            num_open = len(tasks)
            while num_open:
                grown = await self._grown.get()
                if isinstance(grown, BaseException):
                    raise grown
                if grown is None:
                    num_open -= 1
                else:
                    yield grown
        finally:
            await cancel_all(tasks)

    async def _work(self, number: int, work: PromptWork) -> None:
        try:
            await self._grow(number, work)
            self._grown.put_nowait(None)
        except Exception as error:
            self._grown.put_nowait(error)

    async def _grow(self, number: int, work: PromptWork) -> None:
        choices: list[AnswerChoice] = []
        steps = self._instance.generate(work)
        try:
            async for num_tokens in steps:
                choices = choices or self._begin(number, work)
                open_choices = [c for c in choices if c.finish_reason is None]
                for choice in open_choices:
                    choice.grow(num_tokens)
                self._grown.put_nowait(open_choices)
                if all(choice.finish_reason for choice in choices):
                    break
        finally:
            await steps.aclose()  # type: ignore[attr-defined]
        if choices:
            self._instance.keep_answer(work, choices[0].tokens)

    def _begin(self, number: int, work: PromptWork) -> list[AnswerChoice]:
        """The choices of a prompt, once it is known what its blocks were."""
        body = self._body
        echo = self._vocabulary.decode(work.tokens) if body.echo else ""
        varied = body.temperature is None or body.temperature > 0
        choices = [
            AnswerChoice(
                number * work.width + index,
                DrawnAnswer(work.tokens, work.stain, index if varied else 0),
                self._vocabulary,
                body,
                work.num_output_max,
                echo,
            )
            for index in range(work.width)
        ]
        self.choices = sorted([*self.choices, *choices], key=lambda choice: choice.index)
        return choices


def order_of(body: Body) -> Order | None:
    """Instructions of a body about transfers; malformed ones are ignored, as in vLLM's tier."""
    try:
        return read_order(body.kv_transfer_params)
    except ValueError:
        return None


async def prompts_in(
    body: Body, raw: Mapping[str, Any], vocabulary: Vocabulary, *, chat: bool
) -> list[list[int]]:
    """Token ids of a body's prompts; RequestError if they are missing."""
    if not chat:
        special = body.add_special_tokens is not False
        return [
            vocabulary.encode(prompt, special=special) if isinstance(prompt, str) else prompt
            for prompt in prompts_of(body.prompt, vocabulary.size)
        ]
    ids = (body.kv_transfer_params or {}).get("prompt_token_ids")
    if ids is not None:
        tokens = prompts_of(ids, vocabulary.size)[0]
        return [tokens] if isinstance(tokens, list) else []
    if not body.messages:
        raise RequestError("messages must be given and not be empty", param="messages")
    text = await vocabulary.render(raw)
    return [vocabulary.encode(text, special=bool(body.add_special_tokens))]


def lengths_of(
    body: Body, prompts: list[list[int]], max_model_len: int, *, chat: bool
) -> list[int]:
    """Longest answer of every prompt, tokens: one that nobody limits has `OWN_TOKENS` at most;
    RequestError if a prompt or the requested output is too long."""
    asked = body.max_completion_tokens if chat else None
    asked = body.max_tokens if asked is None else asked
    if asked is None and not chat:
        asked = DEFAULT_MAX_TOKENS
    lengths = []
    for tokens in prompts:
        room = max_model_len - len(tokens)
        limit = f"This model's maximum context length is {max_model_len} tokens."
        if room < 1:
            raise RequestError(f"{limit} However, your prompt has {len(tokens)} tokens.")
        if asked is not None and asked > max_model_len:
            raise RequestError(
                f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}.",
                param="max_tokens",
            )
        # An answer has one token at least; echo alone is not worth an exception.
        most = min(room, OWN_TOKENS) if asked is None or asked >= room else asked
        lengths.append(max(most, 1))
    return lengths
