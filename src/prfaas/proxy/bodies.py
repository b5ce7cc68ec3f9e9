"""Prefill requests as the proxy accepts them: what gateways send, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from prfaas.errors import RequestError

TOKENS_MAX = 4_000_000
SALT_CHARS_MAX = 512
WAIT_MS_MAX = 120_000
"""Longest time that a prompt may keep an engine waiting for blocks in transit."""


class Prefill(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt to compute, with one token that nobody reads (`prefill_body` of the gateway)."""

    model: Annotated[str, msgspec.Meta(max_length=256)]
    prompt: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]],
        msgspec.Meta(min_length=1, max_length=TOKENS_MAX),
    ]
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=SALT_CHARS_MAX)]
    max_tokens: Literal[1]
    temperature: int | float = 0
    stream: bool = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def can_wait(self) -> bool:
        """Return True if the engine is to wait for blocks in transit before it computes."""
        return bool(_waits(self))


class Usage(msgspec.Struct):
    """`usage` of an engine's answer."""

    class Details(msgspec.Struct):
        """`prompt_tokens_details`."""

        cached_tokens: int | None = None

    prompt_tokens: int = 0
    prompt_tokens_details: Details | None = None


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_decoder = msgspec.json.Decoder(Prefill)
_answers = msgspec.json.Decoder(_Answer)


def read_prefill(body: bytes) -> Prefill:
    """A request.

    Raises:
        RequestError: It is no prefill, or has other fields.
    """
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"no prefill of a gateway: {error}") from None
    if found.stream:
        raise RequestError("a prefill is not streamed", param="stream")
    if set(found.kv_transfer_params or {}) - {"prfaas"}:
        raise RequestError("orders for other connectors are refused", param="kv_transfer_params")
    for order in _waits(found):
        if not isinstance(wait_ms := order["wait_ms"], int) or not 0 <= wait_ms <= WAIT_MS_MAX:
            raise RequestError(f"wait_ms is 0 to {WAIT_MS_MAX}", param="kv_transfer_params")
    return found


def _waits(prefill: Prefill) -> list[dict[str, Any]]:
    """Orders to wait: `PushOrder.wait`, or a `WaitOrder` in its place."""
    orders = (prefill.kv_transfer_params or {}).get("prfaas")
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
