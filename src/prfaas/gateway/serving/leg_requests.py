"""The bodies that the gateway sends to engines for one request, and rehearsals of them.

An API server refuses requests that a prefill leg, which carries a prompt and nothing else, never
shows it: tools without a parser, several greedy choices, a grammar that does not compile. Such a
request is rehearsed before anything is shipped: sent to the engine that will decode, with a prompt
of one token and an answer of one. If it is refused, the request itself goes there without a remote
prefill, so that the client gets the engine's own words.

References:
    vLLM 0.32: `sampling_params.py` (`_verify_args`, `verify`), `v1/engine/input_processor.py`,
    `entrypoints/openai/chat_completion/protocol.py` and `completion/protocol.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import aiohttp

from prfaas.errors import EngineError
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.http.json_codec import JsonObject, to_json
from prfaas.gateway.http.responses import read_answer
from prfaas.gateway.openai.fields import Trait, fields_with
from prfaas.gateway.openai.requests import Api, ClientRequest
from prfaas.gateway.routing.transfer_tracker import TransferView
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import RoutedPrompt
from prfaas.gateway.tokenization.prompt_encoder import EncodedPrompt

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"

_CHAT_ONLY_KEYS = fields_with(Trait.CHAT)


def wait_order(transfer: TransferView | None, wait_ms: int) -> JsonObject | None:
    """Instructions for an engine's tier about blocks in transit; None without any."""
    if transfer is None:
        return None
    transfer_id = transfer.transfer_id.hex()
    return {"transfer": transfer_id, "source": transfer.source, "wait_ms": wait_ms}


def prefill_body(model: str, prompt: EncodedPrompt, transfer: JsonObject | None) -> JsonObject:
    """The prefill leg: compute the prompt and one token that nobody reads."""
    order: JsonObject = {} if transfer is None else {"kv_transfer_params": {"prfaas": transfer}}
    return order | {
        "model": model,
        "prompt": prompt.token_ids,
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "cache_salt": prompt.cache_salt,
    }


def decode_body(
    client: ClientRequest,
    prompt: EncodedPrompt,
    *,
    max_model_len: int,
    transfer: JsonObject | None,
    with_ids: bool = False,
) -> tuple[str, JsonObject]:
    """The decode leg.

    Args:
        max_model_len: Of the engine; bounds a chat without a limit of its own.
        transfer: What the engine's tier has to know about blocks in transit; None for none.

    Returns:
        Path on the engine, and body.
    """
    if client.by_chat_endpoint:
        path, body = CHAT_PATH, dict(client.body)
    elif client.api is Api.CHAT:
        path, body = COMPLETIONS_PATH, _as_completion(client, prompt, max_model_len)
    else:
        path, body = COMPLETIONS_PATH, client.body | {"max_tokens": client.max_tokens}
        if client.max_tokens is not None and len(prompt.sequences) == 1 and client.is_exact:
            body["max_tokens"] = min(client.max_tokens, _room(prompt, max_model_len))
        # The engine renders the text around a gap.
        sequences = prompt.sequences if client.body.get("suffix") is None else client.prompts
        body["prompt"] = sequences[0] if len(sequences) == 1 else sequences
    parameters: JsonObject = {"prfaas": transfer} if transfer else {}
    if client.by_chat_endpoint and client.is_exact and not body.get("return_prompt_text"):
        # vLLM's own way to hand the ids of another leg to its chat endpoint; it takes them out.
        parameters["prompt_token_ids"] = prompt.token_ids
    if parameters:
        body["kv_transfer_params"] = parameters
    body["cache_salt"] = prompt.cache_salt
    if client.stream:
        continuous = client.continuous_usage
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": continuous}
    if with_ids:
        body["return_token_ids"] = True
    return path, body


def _as_completion(client: ClientRequest, prompt: EncodedPrompt, max_model_len: int) -> JsonObject:
    """A chat request in the words of the completions API."""
    body = {key: value for key, value in client.body.items() if key not in _CHAT_ONLY_KEYS}
    body["prompt"] = prompt.token_ids
    room = _room(prompt, max_model_len)
    body["max_tokens"] = room if client.max_tokens is None else min(client.max_tokens, room)
    return body


def _room(prompt: EncodedPrompt, max_model_len: int) -> int:
    """Tokens that the model's length leaves for an answer, at least 1.

    An engine that restarted with a shorter length refuses the prompt by itself.
    """
    return max(max_model_len - prompt.num_tokens, 1)


PASSED_MAX = 1024
"""Combinations of fields that are remembered to be taken."""
UNKNOWN_MAX = 1024
NUM_CHOICES = 2
"""More than one choice is refused, or is not, whatever their number."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily; without one the model's default counts."""
_UNSEEN, _RENDERED = fields_with(Trait.OURS), fields_with(Trait.TEMPLATE)
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
"""Values of which vLLM takes every one."""


class Rehearsal:
    """Asks engines whether they take requests; what they took once is not asked again.

    Args:
        count: Called with the outcome: "passed", "refused", "unknown", or "skipped" where the
            engine did not answer another one lately.
        limit_s: An engine that does not answer by then is taken to agree.
        pause_s: For this time such an engine is not asked again by the same tenant.
    """

    def __init__(
        self, engines: Engines, count: Callable[[str], None], limit_s: float, pause_s: float
    ) -> None:
        self._engines, self._count = engines, count
        self._limit_s, self._pause_s = limit_s, pause_s
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._unknown: OrderedDict[tuple[str, str], float] = OrderedDict()
        """By engine and tenant's salt, until when it is not asked."""

    async def is_refused(self, exchange: Exchange, plan: RoutedPrompt) -> bool:
        """Return True if the engine that would decode a request does not take it."""
        client = exchange.client
        if is_plain(client):
            return False
        key = _key(client, plan.prompt.cache_salt)
        if key in self._passed:
            self._passed.move_to_end(key)
            return False
        unheard = (plan.route.decode, plan.prompt.cache_salt)
        if self._unknown.get(unheard, 0.0) > time.monotonic():
            self._count("skipped")
            return False
        status = await self._ask(exchange, plan)
        if status is None or status >= 500:
            self._count("unknown")
            self._remember_unknown(unheard)
            return False
        if status >= 400:
            self._count("refused")
            return True
        self._count("passed")
        self._passed[key] = None
        if len(self._passed) > PASSED_MAX:
            self._passed.popitem(last=False)
        return False

    def _remember_unknown(self, unheard: tuple[str, str]) -> None:
        self._unknown[unheard] = time.monotonic() + self._pause_s
        self._unknown.move_to_end(unheard)
        if len(self._unknown) > UNKNOWN_MAX:
            self._unknown.popitem(last=False)

    async def _ask(self, exchange: Exchange, plan: RoutedPrompt) -> int | None:
        """Status of a rehearsal; None without an answer."""
        path, body = rehearsed(exchange.client, plan)
        decode, headers = self._engines.by_name[plan.route.decode], exchange.leg_headers("v")
        try:
            async with (
                asyncio.timeout(self._limit_s),
                self._engines.post(decode, path, body, headers) as response,
            ):
                await read_answer(response)
                return response.status
        except (TimeoutError, EngineError, aiohttp.ClientError):
            return None


def is_plain(client: ClientRequest) -> bool:
    """Return True if every engine is known to accept the fields of a request."""
    if client.by_chat_endpoint:
        return False
    body = client.body
    for name, value in body.items():
        if value is None or name in _UNSEEN or name in _RENDERED:
            continue
        if name == "n":
            if value > 1 and (body.get("temperature") or 0.0) < GREEDY_BELOW:
                return False
        elif name == "stop":
            if "" in ([value] if isinstance(value, str) else value):
                return False
        elif name not in _RANGES or not _RANGES[name][0] <= value <= _RANGES[name][1]:
            return False
    return True


def rehearsed(client: ClientRequest, plan: RoutedPrompt) -> tuple[str, JsonObject]:
    """Path and body of a request with a prompt and an answer of one token."""
    prompt = replace(plan.prompt, sequences=[[plan.prompt.token_ids[0]]], hashes=[])
    path, body = decode_body(client, prompt, max_model_len=prompt.num_tokens + 1, transfer=None)
    for name in ("stream", "stream_options", "max_completion_tokens", *_RENDERED):
        body.pop(name, None)
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "."}]
    body["max_tokens"] = 1
    least = body.pop("min_tokens", None)
    if least is not None and client.max_tokens is not None and least > client.max_tokens:
        body["min_tokens"] = 2
    if client.num_choices > 1:
        body["n"] = NUM_CHOICES
    return path, body


def _key(client: ClientRequest, cache_salt: str) -> bytes:
    """Digest of what a rehearsal depends on, by tenant."""
    told = {name: value for name, value in client.body.items() if name not in _UNSEEN}
    shape = [client.api.value, client.by_chat_endpoint, cache_salt, told]
    return hashlib.blake2b(to_json(shape), digest_size=16).digest()
