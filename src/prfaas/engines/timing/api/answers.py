"""One request to an instance: from a checked body to growing answers and their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from prfaas.engines.orders import Order, read_order
from prfaas.engines.timing.api.bodies import DEFAULT_MAX_TOKENS, Body, Usage, prompts_of
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.engines.timing.blocks import DrawnAnswer
from prfaas.engines.timing.instance import PromptWork, TimedInstance
from prfaas.errors import RequestError
from prfaas.tasks import cancel_all

LOGPROB = -0.5
"""Log probability of a token; each further listed token is one lower."""


class AnswerChoice:
    """One answer.

    Args:
        index: Its number in the reply.
        answer: Draws its tokens.
        num_tokens_max: Where it ends at the latest.
        echo: Text that it begins with.
    """

    def __init__(
        self,
        index: int,
        answer: DrawnAnswer,
        vocabulary: Vocabulary,
        body: Body,
        num_tokens_max: int,
        echo: str = "",
    ) -> None:
        self.index, self._answer, self._vocabulary, self._body = index, answer, vocabulary, body
        self._num_max = num_tokens_max
        self._stop_tokens = frozenset(body.stop_token_ids or ())
        self._held_back = max((len(stop) - 1 for stop in body.stops), default=0)
        self.text, self.tokens = echo, list[int]()
        self._answer_at = len(echo)
        self._sent_chars = self._sent_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def grow(self, num_tokens: int) -> None:
        """Record the number of computed tokens of this answer."""
        while self.finish_reason is None and len(self.tokens) < num_tokens:
            token = self._answer.next(self._vocabulary.spoken)
            self.tokens.append(token)
            before = len(self.text)
            self.text += self._vocabulary.texts[token]
            may_stop = len(self.tokens) >= (self._body.min_tokens or 0)
            if may_stop and self._stops(token, before):
                return
            if len(self.tokens) >= self._num_max:
                self.finish_reason = "length"

    def take(self) -> tuple[str, list[int]]:
        """Text and tokens that were not taken yet; text that may turn out a stop is kept back."""
        end = len(self.text) - (0 if self.finish_reason else self._held_back)
        text = self.text[self._sent_chars : max(end, self._sent_chars)]
        tokens = self.tokens[self._sent_tokens :]
        self._sent_chars, self._sent_tokens = self._sent_chars + len(text), len(self.tokens)
        return text, tokens

    def _stops(self, token: int, before: int) -> bool:
        if token in self._stop_tokens:
            self.finish_reason, self.stop_reason = "stop", token
            return True
        start = max(before - self._held_back, self._answer_at)
        found = [(self.text.find(stop, start), stop) for stop in self._body.stops]
        found = [(at, stop) for at, stop in found if at >= 0]
        if found:
            at, stop = min(found)
            self.finish_reason, self.stop_reason = "stop", stop
            self.text = self.text[: at + (len(stop) * self._body.include_stop_str_in_output)]
        return bool(found)

    # Log probabilities: made up, so that clients find the fields they expect.

    def completion_logprobs(self, tokens: list[int]) -> dict[str, Any] | None:
        """Form of the completions API."""
        count = self._body.logprobs
        if count is None or isinstance(count, bool):
            return None
        texts = [self._vocabulary.texts[token] for token in tokens]
        return {
            "text_offset": [0] * len(tokens),
            "token_logprobs": [LOGPROB] * len(tokens),
            "tokens": texts,
            "top_logprobs": [self._top(token, count) for token in tokens],
        }

    def chat_logprobs(self, tokens: list[int]) -> dict[str, Any] | None:
        """Form of the chat API."""
        if self._body.logprobs is not True:
            return None
        return {
            "content": [
                _entry(self._vocabulary.texts[token], LOGPROB)
                | {
                    "top_logprobs": [
                        _entry(text, logprob)
                        for text, logprob in self._top(token, self._body.top_logprobs or 0).items()
                    ][: self._body.top_logprobs or 0]
                }
                for token in tokens
            ]
        }

    def _top(self, token: int, count: int) -> dict[str, float]:
        others = (self._vocabulary.texts[other] for other in self._vocabulary.spoken)
        chosen = self._vocabulary.texts[token]
        top = {chosen: LOGPROB}
        for text in others:
            if len(top) >= max(count, 1):
                break
            top.setdefault(text, LOGPROB - len(top))
        return top


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


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
