"""The bodies that the gateway sends to engines for one request."""

from __future__ import annotations

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.fields import Trait, fields_with
from prfaas.gateway.openai.requests import Api, ClientRequest
from prfaas.gateway.routing.transfer_tracker import TransferView
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
    """The decode leg; returns path on the engine, and body.

    Args:
        max_model_len: Of the engine; bounds a chat without a limit of its own.
        transfer: What the engine's tier has to know about blocks in transit; None for none.
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
