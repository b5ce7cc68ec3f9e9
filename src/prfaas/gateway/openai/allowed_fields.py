"""Fields of a request body that reach an engine, by allow-list.

vLLM ignores what it does not know and obeys what it does: `priority` moves a request ahead of
others, `data_parallel_rank` picks its GPUs, `logits_processors` names code. A field reaches an
engine if it is listed here, or if the operator lists it for everybody or for a tenant.

References:
    vLLM 0.32, `entrypoints/openai/chat_completion/protocol.py` and `completion/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.openai.validation import bad, shown

CONTROL_FIELDS = frozenset(
    {"kv_transfer_params", "cache_salt", "ec_transfer_params", "kv_hints", "request_id"}
)
CONTROL_PREFIX = "bootstrap_"
"""They steer caches and transfers: removed from every body, whatever an operator lists."""
DROPPED_FIELDS = frozenset(
    {
        *("audio", "function_call", "functions", "metadata", "modalities", "moderation"),
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "verbosity", "web_search_options"),
    }
)
"""OpenAI's, which no engine reads: removed, so that its clients work unchanged."""
_COMMON = frozenset(
    {
        *("model", "max_tokens", "n", "best_of", "seed", "stop", "stream", "stream_options"),
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"),
        *("logprobs", "user", "echo", "response_format"),
        # vLLM's: sampling.
        *("top_k", "min_p", "repetition_penalty", "length_penalty", "min_tokens", "ignore_eos"),
        *("stop_token_ids", "include_stop_str_in_output", "bad_words", "allowed_token_ids"),
        *("use_beam_search", "structured_outputs", "thinking_token_budget", "vllm_xargs"),
        *("repetition_detection", "truncate_prompt_tokens", "truncation_side"),
        # vLLM's fields of details of prompt and answer.
        *("prompt_logprobs", "logprob_token_ids", "return_token_ids", "return_token_offsets"),
        *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        "add_special_tokens",
    }
)
_CHAT = frozenset(
    {
        *("messages", "max_completion_tokens", "top_logprobs", "reasoning_effort"),
        *("tools", "tool_choice", "parallel_tool_calls"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents"),
        *("include_reasoning", "return_prompt_text", "media_io_kwargs", "mm_processor_kwargs"),
    }
)
_COMPLETIONS = frozenset({"prompt", "suffix"})
_TOKENIZE = frozenset({"return_token_strs"})
REFUSED = ("chat_template", "prompt_embeds")
"""A program for the template engine, and tensors for the model: neither is taken from clients."""
KNOWN_FIELDS = _COMMON | _CHAT | _COMPLETIONS | _TOKENIZE
"""Fields of all endpoints: the engine ignores fields of the other API."""
NAMES_SHOWN = 8


def is_control(name: str) -> bool:
    """Return True for a field that steers an engine's caches or transfers."""
    return name in CONTROL_FIELDS or name.startswith(CONTROL_PREFIX)


def allowed(body: JsonObject, more: Collection[str] = ()) -> JsonObject:
    """A body without the fields that are for no engine.

    Args:
        body: As the client sent it.
        more: Fields that the operator allows besides.

    Raises:
        RequestError: 400, naming the fields that are not allowed.
    """
    known = (KNOWN_FIELDS | {*REFUSED}).union(more)
    taken = known | DROPPED_FIELDS
    unknown = [
        name
        for name, value in body.items()
        if name not in taken and not is_control(name) and value is not None
    ]
    if unknown:
        names = ", ".join(map(shown, unknown[:NAMES_SHOWN]))
        raise bad(
            f"{names} cannot be set here: leave it out, or have the operator list it under "
            "gateway.request_fields or the tenant's request_fields",
            unknown[0][:80],
        )
    for name in REFUSED:
        if body.get(name) is not None:
            raise bad(f"{name} is not accepted from clients", name)
    kept = {name: value for name, value in body.items() if name in known and not is_control(name)}
    # vLLM merges this object into the very dictionary that carries kv_transfer_params.
    if isinstance(extra := kept.get("vllm_xargs"), dict):
        kept["vllm_xargs"] = {name: v for name, v in extra.items() if not is_control(name)}
    return kept
