"""Prefill requests as the proxy accepts them: what gateways send, and nothing else.

A body is read in two steps. The first makes no object for a token and decides whether the request
is the site's own; the second checks the token ids, in pieces, once it is the request's turn, so
that its site is charged for it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec

from prfaas.errors import RequestError

TOKENS_MAX = 4_000_000
ORDERS_BYTES_MAX = 8 << 20
"""Limit of `kv_transfer_params`: the longest ticket, and room."""
ORDERS_OBJECTS_MAX = 16
PIECE_BYTES = 128 << 10
"""Token ids that are checked between two turns of the event loop: one or two milliseconds."""
SALT_CHARS_MAX = 512
WAIT_MS_MAX = 120_000
"""Longest time that a prompt may keep an engine waiting for blocks in transit."""


class Prefill(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt to compute, with one token that nobody reads (`prefill_body` of the gateway)."""

    model: Annotated[str, msgspec.Meta(max_length=256)]
    prompt: msgspec.Raw
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=SALT_CHARS_MAX)]
    max_tokens: Literal[1]
    temperature: int | float = 0
    stream: bool = False
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return bytes(self.prompt).count(b",") + 1

    @property
    def can_wait(self) -> bool:
        """Return True if the engine is to wait for blocks in transit before it computes."""
        return bool(_waits(_orders(self)))

    async def check_tokens(self) -> None:
        """Check the token ids, with pauses for others; RequestError (400) if some are none."""
        prompt = bytes(self.prompt)
        start, end = 1, len(prompt) - 1
        while start < end:
            cut = prompt.find(b",", start + PIECE_BYTES, end)
            cut = end if cut < 0 else cut
            try:
                _tokens.decode(b"[%b]" % prompt[start:cut])
            except msgspec.DecodeError as error:
                raise RequestError(f"no token ids: {error}", param="prompt") from None
            start = cut + 1
            await asyncio.sleep(0)


class EngineUsage(msgspec.Struct):
    """`usage` of an engine's answer."""

    class Details(msgspec.Struct):
        """`prompt_tokens_details`."""

        cached_tokens: int | None = None

    prompt_tokens: int = 0
    prompt_tokens_details: Details | None = None


class _Answer(msgspec.Struct):
    usage: EngineUsage | None = None


_decoder = msgspec.json.Decoder(Prefill)
_tokens = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]])
_IN_LISTS = b"0123456789, \t\r\n"
_answers = msgspec.json.Decoder(_Answer)


def read_prefill(body: bytes) -> Prefill:
    """A request whose token ids are not checked; RequestError if it is no prefill, or has other
    fields."""
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"no prefill of a gateway: {error}") from None
    if found.stream:
        raise RequestError("a prefill is not streamed", param="stream")
    prompt = bytes(found.prompt)
    if prompt.translate(None, _IN_LISTS) != b"[]":
        raise RequestError("the prompt is no list of token ids", param="prompt")
    if prompt.count(b",") >= TOKENS_MAX or not prompt.strip(b"[] \t\r\n"):
        raise RequestError(f"a prompt has 1 to {TOKENS_MAX} tokens", param="prompt")
    orders = _orders(found)
    if set(orders) - {"prfaas"}:
        raise RequestError("orders for other connectors are refused", param="kv_transfer_params")
    for order in _waits(orders):
        if not isinstance(wait_ms := order["wait_ms"], int) or not 0 <= wait_ms <= WAIT_MS_MAX:
            raise RequestError(f"wait_ms is 0 to {WAIT_MS_MAX}", param="kv_transfer_params")
    return found


def _orders(prefill: Prefill) -> dict[str, Any]:
    """Its orders, which are few and not deep; RequestError (400) if they are not."""
    text = bytes(prefill.kv_transfer_params)
    num_objects = text.count(b"{") + text.count(b"[")
    if len(text) > ORDERS_BYTES_MAX or num_objects > ORDERS_OBJECTS_MAX:
        raise RequestError("no orders of a gateway: they are too large", param="kv_transfer_params")
    try:
        orders: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any] | None) or {}
    except msgspec.DecodeError as error:
        raise RequestError(f"no orders of a gateway: {error}", param="kv_transfer_params") from None
    return orders


def _waits(params: dict[str, Any]) -> list[dict[str, Any]]:
    """Orders to wait: `PushOrder.wait`, or a `WaitOrder` in its place."""
    orders = params.get("prfaas")
    places = [orders, orders.get("wait")] if isinstance(orders, dict) else []
    return [each for each in places if isinstance(each, dict) and "wait_ms" in each]


def computed_in(answer: bytes, num_tokens: int) -> int:
    """Prompt tokens that an engine computed: all of them unless it reports cached ones."""
    try:
        usage = _answers.decode(answer).usage
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return num_tokens
    details = usage.prompt_tokens_details if usage is not None else None
    cached = details.cached_tokens if details is not None else None
    return max(0, num_tokens - max(0, cached or 0))
