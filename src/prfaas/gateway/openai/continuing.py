"""Requests whose answer one engine begins and another one continues: which they may be, and what is
left of one.

The second engine gets the tokens so far as a part of its prompt. Not possible with what an engine
keeps of an answer beside its tokens: grammars, tool parsers, counts of output tokens for penalties,
offsets of logprobs, several answers at once.

References:
    vLLM 0.32: `sampling_params.py`; `v1/sample/` (penalties, `bad_words`, seeded generators);
    `v1/sample/logits_processor/builtin.py` (`min_tokens`); `v1/core/sched/utils.py` (`check_stop`).
"""

from __future__ import annotations

from dataclasses import replace

from prfaas.gateway.openai.fields import Trait, fields_with
from prfaas.gateway.openai.requests import ClientRequest

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily; without one the model's default counts."""
_KEPT_KEYS = fields_with(Trait.EACH) | {
    *("priority", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "spaces_between_special_tokens",
}
"""Fields that apply to each next token separately; those by name are there if an operator lists
them."""
_OFF = (None, False, 0, {"type": "text"})


def why_one_engine(client: ClientRequest) -> str:
    """Return why one engine has to make all of an answer; empty if another one can continue it."""
    body = client.body
    reasons = {
        "tools, reasoning and the like": client.by_chat_endpoint,
        "a prompt that the engine changes": not client.is_exact,
        "several answers": client.num_choices > 1 or len(client.prompts) > 1,
        # None is as good as False, but 0 asks for those of the tokens themselves.
        "logprobs": type(body.get("logprobs")) is int,
        "spaces_between_special_tokens": body.get("spaces_between_special_tokens") is False,
        "stop with min_tokens": body.get("stop") and body.get("min_tokens"),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    found += [key for key, value in body.items() if key not in _KEPT_KEYS and value not in _OFF]
    return next(iter(found), "")


def why_not_early(client: ClientRequest) -> str:
    """Return why the answer might change if the engine that prefills gives the first token; empty
    if it cannot."""
    body = client.body
    if body.get("seed") is not None and not is_greedy(client):
        return "seed, whose random numbers one engine draws"
    if is_greedy(client) and not client.stream and client.max_tokens != 1:
        return "greedy without stream, which decode makes whole"
    if body.get("stop") and not client.stream and not is_greedy(client):
        return "stop without stream"
    return why_one_engine(client)


def why_not_relay(client: ClientRequest, setting: str) -> str:
    """Return why the engine that prefills makes no token after the first; empty if it may.

    Args:
        setting: `routing.relay_decode`.
    """
    if setting == "off":
        return "off"
    if not client.stream:
        return "no stream"
    if setting == "auto" and is_greedy(client):
        return "greedy: another engine might choose otherwise after tokens of the first"
    return why_not_early(client)


def is_greedy(client: ClientRequest) -> bool:
    """Return True if each token is the most likely one."""
    temperature = client.body.get("temperature")
    return client.body.get("top_k") == 1 or (temperature is not None and temperature < GREEDY_BELOW)


def first_of(client: ClientRequest, num_tokens: int) -> ClientRequest:
    """Return a request for the first `num_tokens` of an answer."""
    body = dict(client.body)
    if body.get("min_tokens"):
        body["min_tokens"] = min(body["min_tokens"], num_tokens)
    return replace(client, body=body, max_tokens=num_tokens)


def rest_of(client: ClientRequest, num_tokens: int) -> ClientRequest:
    """Return the rest of a request after `num_tokens` of output."""
    body = dict(client.body)
    if body.get("min_tokens"):
        body["min_tokens"] = max(0, body["min_tokens"] - num_tokens)
    max_tokens = client.max_tokens
    return replace(
        client, body=body, max_tokens=None if max_tokens is None else max_tokens - num_tokens
    )


def stop_strings(client: ClientRequest) -> list[str]:
    """Stop strings of a request."""
    stop = client.body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop
