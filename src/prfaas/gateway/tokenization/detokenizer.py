"""Text of each token of an answer, as from the engine's incremental detokeniser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NoDetokenizerError(Exception):
    """The tokenizer, or these tokens, cannot be detokenised the way the engine does."""


def pieces(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], *, skip_special: bool
) -> list[str]:
    """Text that each of `token_ids` added behind a prompt; "" where it only began a character.

    Args:
        tokenizer: A fast tokenizer of `transformers`.
        prompt_ids: What came before: it decides about spaces and half characters.
        skip_special: Special tokens give no text.

    Raises:
        NoDetokenizerError: It cannot be done exactly.

    References:
        vLLM 0.32, `v1/engine/detokenizer.py`, `FastIncrementalDetokenizer`.
    """
    from tokenizers.decoders import DecodeStream

    core = getattr(tokenizer, "_tokenizer", None)
    if core is None:
        raise NoDetokenizerError("the tokenizer is no fast one")
    stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip_special)
    try:
        return [stream.step(core, token_id) or "" for token_id in token_ids]
    except Exception as error:
        # The library raises plain `Exception` where an answer is no valid UTF-8.
        raise NoDetokenizerError(str(error)) from None
