"""Prompts as token ids and block hashes: made once; long ones off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from prfaas.core.blocks import Layout
from prfaas.errors import ConfigError
from prfaas.gateway.detokenizing import pieces
from prfaas.gateway.encoding import Encoder, Naming
from prfaas.gateway.fields import bad
from prfaas.gateway.ids_json import make_ready
from prfaas.gateway.jsons import JsonObject
from prfaas.gateway.requests import Api, ClientRequest

THREADS = 2
SHORT_BYTES_MAX = 8192
"""The prompt of a body up to this takes a millisecond or two: waking a thread is not worth it."""
_RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "messages",
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engines see it.

    Attributes:
        sequences: Token ids; one entry unless the client sent several prompts.
        hashes: Block hash chain of the only sequence; empty with several, or without a layout.
        cache_salt: Its tenant's salt, which the chain begins with.
    """

    sequences: Sequence[Sequence[int]]
    hashes: list[bytes]
    cache_salt: str

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of the only, or first, sequence."""
        return self.sequences[0]

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)


class PromptMaker:
    """Makes prompts with the model's own tokenizer and chat template.

    Args:
        path: Checkpoint directory or name.

    Raises:
        ConfigError: There is no tokenizer at `path`.
    """

    def __init__(self, path: str) -> None:
        self._tokenizer, self.vocab_size = _load(path)
        self._chars_per_token_max = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._encoder = Encoder(self._tokenizer)
        make_ready(self.vocab_size)
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Let the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def words(self, ids: list[int]) -> tuple[str, list[str]]:
        """The text of token ids, and how the tokenizer writes each of them; on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._words, ids)

    def _words(self, ids: list[int]) -> tuple[str, list[str]]:
        # Ids that the model has and the tokenizer has not are no words.
        words = [word or "" for word in self._tokenizer.convert_ids_to_tokens(ids)]
        return str(self._tokenizer.decode(ids)), words

    async def prompt(
        self, client: ClientRequest, cache_salt: str, layout: Layout | None, max_model_len: int
    ) -> Prompt:
        """Render, tokenise and hash; on another thread unless the request is short.

        Args:
            client: The request.
            cache_salt: Its tenant's salt, for the hash chain.
            layout: What to hash for; None skips hashing.
            max_model_len: Text that can not possibly fit is refused untokenised.

        Raises:
            RequestError: 400, the chat template refuses the messages or the text is far too long.
        """
        work = partial(self._make, client, cache_salt, layout, max_model_len)
        if client.num_bytes is not None and client.num_bytes <= SHORT_BYTES_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def texts(
        self, prompt_ids: Sequence[int], token_ids: list[int], *, skip_special: bool
    ) -> list[str]:
        """What text each token of an answer gave, on another thread; see `pieces`.

        Raises:
            NoDetokenizerError: It can not be told exactly.
        """
        work = partial(pieces, self._tokenizer, prompt_ids, token_ids, skip_special=skip_special)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _make(
        self, client: ClientRequest, cache_salt: str, layout: Layout | None, max_model_len: int
    ) -> Prompt:
        naming = Naming(cache_salt)
        if layout is not None and len(client.prompts) <= 1:
            naming = Naming(cache_salt, layout.tokens_per_hash, layout.hash_seed)
        chars_max = max_model_len * self._chars_per_token_max
        if client.api is Api.CHAT:
            special = bool(client.body.get("add_special_tokens"))
            text = _render(self._tokenizer, client)
            _check_chars(text, chars_max, max_model_len, "messages")
            made: list[tuple[Sequence[int], list[bytes]]] = [
                self._encoder.encode(text, special, naming)
            ]
        else:
            special = client.body.get("add_special_tokens") is not False
            for prompt in client.prompts:
                if isinstance(prompt, str):
                    _check_chars(prompt, chars_max, max_model_len, "prompt")
            made = [self._one(prompt, special, naming) for prompt in client.prompts]
        sequences, hashes = [ids for ids, _ in made], made[0][1]
        if not all(sequences):
            raise bad("the prompt has no tokens; at least 1 is needed")
        return Prompt(sequences, hashes, cache_salt)

    def _one(
        self, prompt: str | list[int], special: bool, naming: Naming
    ) -> tuple[Sequence[int], list[bytes]]:
        if isinstance(prompt, str):
            return self._encoder.encode(prompt, special, naming)
        return prompt, self._encoder.hashes(prompt, naming)


def _check_chars(text: str, chars_max: int, max_model_len: int, param: str) -> None:
    """Text that is too long whatever its tokens are is not worth tokenising."""
    if len(text) > chars_max:
        raise bad(
            f"the prompt has {len(text)} characters; {max_model_len} tokens, the model's "
            f"length, are at most {chars_max} characters",
            param,
        )


def _render(tokenizer: Any, client: ClientRequest) -> str:
    body = client.body
    variables = _template_variables(body)
    try:
        return str(
            tokenizer.apply_chat_template(
                _for_template(tokenizer, client.messages),
                tools=client.tools or None,
                documents=body.get("documents"),
                add_generation_prompt=body.get("add_generation_prompt") is not False,
                continue_final_message=bool(body.get("continue_final_message")),
                tokenize=False,
                **variables,
            )
        )
    except Exception as error:
        # A template is the model's own program: it refuses input by raising what it likes.
        raise bad(f"the chat template refuses the messages: {error}", "messages") from None


def _for_template(tokenizer: Any, messages: list[JsonObject]) -> list[JsonObject]:
    """Developer messages become system messages where the template knows no developer."""
    template = tokenizer.chat_template
    if isinstance(template, str) and "developer" in template:
        return messages
    return [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def _template_variables(body: JsonObject) -> JsonObject:
    variables: JsonObject = dict(body.get("chat_template_kwargs") or {})
    reserved = sorted(_RESERVED_TEMPLATE_NAMES & variables.keys())
    if reserved:
        raise bad(
            f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    effort = body.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    return variables


def _load(path: str) -> tuple[Any, int]:
    """Tokenizer, and the number of token ids that the model knows."""
    from transformers import AutoTokenizer, PretrainedConfig

    # One text at a time, on a thread of ours: the tokenizer's own threads would be in the way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        config, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"no tokenizer for model.path {path!r}: {reason}") from None
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    return tokenizer, max(len(tokenizer), int(vocab_size))
