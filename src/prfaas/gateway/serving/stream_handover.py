"""Events that the gateway itself adds to a stream without engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from aiohttp import web

from prfaas.errors import EngineError
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.serving.continuation import StreamedAnswer, rest_of
from prfaas.gateway.serving.decode_leg import client_chunks
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.gateway.tokenization.detokenizer import NoDetokenizerError
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt, PromptMaker


@dataclass(frozen=True, slots=True)
class StreamHandover:
    """Continues and ends streams."""

    prompts: PromptMaker
    model: str

    async def seam(
        self, exchange: Exchange, plan: RoutedPrompt
    ) -> tuple[ClientRequest, EncodedPrompt]:
        """Rest of a stream after the loss of its engine.

        Returns:
            The rest of the request, and its prompt with the tokens so far. Nothing is left if the
            engine held back a stop string: `exchange.is_answered`.

        Raises:
            EngineError: It is unknown which text the client has.
        """
        answer = exchange.answer
        assert answer is not None  # noqa: S101 (others are not continued)
        try:
            num_moved = answer.move(await self._texts(exchange, plan, answer))
        except (NoDetokenizerError, ValueError) as error:
            raise EngineError(
                f"the decode engine broke, and no other can continue: {error}"
            ) from None
        if answer.is_stopped:
            await self._say(exchange, {"choices": [{"index": 0, "text": "", "logprobs": None}]})
        exchange.usage.num_moved = num_moved
        if exchange.usage.cached_max is None:
            exchange.usage.cached_max = plan.routed.present_tokens
        ids = [*plan.prompt.token_ids, *answer.token_ids]
        return rest_of(exchange.client, num_moved), replace(plan.prompt, sequences=[ids])

    async def end(self, exchange: Exchange, plan: RoutedPrompt) -> web.StreamResponse:
        """Send what comes after the last token: usage and the end mark."""
        answer = exchange.answer
        assert answer is not None  # noqa: S101 (others end with their engine)
        num_tokens = len(answer.token_ids)
        if answer.stop_end is not None:
            ends = itertools.accumulate(map(len, await self._texts(exchange, plan, answer)))
            num_tokens = 1 + sum(end < answer.stop_end for end in ends)
        exchange.usage.num_moved = 0
        usage = {
            "prompt_tokens": plan.prompt.num_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": plan.prompt.num_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": plan.routed.present_tokens},
        }
        await self._say(exchange, {"choices": [], "usage": usage})
        exchange.finish()
        return await exchange.stream.finish()

    async def _say(self, exchange: Exchange, chunk: JsonObject) -> None:
        model = exchange.client.body.get("model", self.model)
        head = {"object": "text_completion", "model": model}
        for event in client_chunks(head | chunk, exchange):
            await exchange.stream.send(event)

    async def _texts(
        self, exchange: Exchange, plan: RoutedPrompt, answer: StreamedAnswer
    ) -> list[str]:
        skip = exchange.client.body.get("skip_special_tokens") is not False
        prompts, prompt_ids = self.prompts, plan.prompt.token_ids
        tenant = exchange.tenant
        return await prompts.texts(prompt_ids, answer.token_ids, tenant, skip_special=skip)
