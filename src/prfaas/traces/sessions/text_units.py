"""Units of text lengths: tokens of a model, or characters with a ratio per token."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

BLOCK_TOKENS = 64
"""Tokens of a block of sessions."""
MESSAGE_TOKENS = 4
"""Tokens of the markers of a message: begin, role, line break, end."""


@dataclass(frozen=True, slots=True)
class TextUnits:
    """A measure of texts.

    Attributes:
        cut: From a text to its units, as bytes of `unit_bytes` each.
        units_per_block: Units of a block of `BLOCK_TOKENS` tokens.
        units_per_message: Units of the markers around a message.
    """

    title: str
    cut: Callable[[str], bytes]
    unit_bytes: int
    units_per_block: int
    units_per_message: int

    def num_tokens(self, num_units: int) -> int:
        """Tokens of a number of units, rounded up."""
        return ceil(num_units * BLOCK_TOKENS / self.units_per_block)


def characters(per_token: float) -> TextUnits:
    """Characters with a fixed number per token.

    Args:
        per_token: In [0.25, 64].
    """
    return TextUnits(
        f"{per_token:g} characters a token",
        lambda text: text.encode("utf-32-le"),
        4,
        round(BLOCK_TOKENS * per_token),
        round(MESSAGE_TOKENS * per_token),
    )


def tokens_of(directory: Path) -> TextUnits:
    """Tokens of a model.

    Args:
        directory: Holds its `tokenizer.json`.

    Raises:
        ConfigError: It cannot be read.
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from None

    def cut(text: str) -> bytes:
        return array("I", tokenizer.encode(text, add_special_tokens=False).ids).tobytes()

    name = f"tokens of {directory.name or directory}"
    return TextUnits(name, cut, array("I").itemsize, BLOCK_TOKENS, MESSAGE_TOKENS)
