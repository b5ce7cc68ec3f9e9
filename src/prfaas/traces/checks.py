"""Checks on the values of a line."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from prfaas.traces import limits
from prfaas.traces.drops import DroppedError

Decoded = TypeVar("Decoded")


def decode(decoder: msgspec.json.Decoder[Decoded], line: bytes) -> Decoded:
    """Decode a line of JSON.

    Raises:
        DroppedError: It is no JSON, or a field is missing or has the wrong type.
    """
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as error:
        raise DroppedError("a field is missing or has the wrong type", str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DroppedError("no valid JSON", str(error)) from None


def in_range(field: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Check a value against its range.

    Raises:
        DroppedError: It is outside, or no number.
    """
    if not low <= value <= high:
        expected = f"expected {_shown(low)} to {_shown(high)} {unit}".strip()
        raise DroppedError(
            f"{field} is out of range; {expected}", f"{field} is {_shown(value)}; {expected}"
        )


def check_prompt(field: str, num_tokens: int) -> None:
    """Check a prompt length.

    Raises:
        DroppedError: It is below 1 or too long.
    """
    in_range(field, num_tokens, 1, limits.NUM_PROMPT_TOKENS_MAX, "tokens")


def check_output(field: str, num_tokens: int) -> None:
    """Check an output length; 0 is taken as 1, since a prefill gives a token.

    Raises:
        DroppedError: It is negative or too long.
    """
    in_range(field, num_tokens, 0, limits.NUM_OUTPUT_TOKENS_MAX, "tokens")


def shown_name(name: str) -> str:
    """A name out of a file, short and without control characters, for messages."""
    return name[:40] if name.isprintable() else ascii(name[:40])


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"
