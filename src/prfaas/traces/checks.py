"""Limits of traces, checks of their fields, and what was dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import msgspec


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Limits on the size of a trace and of what it holds."""

    file_bytes_max: int = 4 * 2**30
    line_bytes_max: int = 2**24
    num_requests_max: int = 5_000_000
    num_prompt_tokens_max: int = 2_000_000
    """Tokens of a prompt of chat transcripts."""
    num_block_ids_max: int = 50_000_000
    """Ids of blocks, over all requests of a trace."""
    num_chat_blocks_max: int = 8_000_000
    """Different blocks of chat transcripts."""


LIMITS = TraceLimits()
NUM_REQUESTS_MAX = LIMITS.num_requests_max
NUM_PROMPT_TOKENS_MAX = LIMITS.num_prompt_tokens_max
NUM_OUTPUT_TOKENS_MAX = 2_000_000
NUM_SESSIONS_MAX = 1_000_000
NUM_TURNS_MAX = 100_000
"""Limit of one session."""
BLOCK_ID_MAX = 2**48
TENANT_CHARS_MAX = 128
SECONDS_MAX = 10.0**9
"""Limit of a pause."""
INSTANT_S_MAX = 10.0**10
"""Seconds since 1970 in the year 2286."""
SPAN_S = 366 * 86_400
"""An instant that is further from the trace's median is damaged."""


class DroppedError(Exception):
    """A line that gives no request.

    Args:
        reason: The same for all lines with this problem; the count goes by it.
        detail: The problem of this line, with its value and the limit.
        damaged: False for a line that is as it should be but not wanted.
    """

    def __init__(self, reason: str, detail: str = "", *, damaged: bool = True) -> None:
        super().__init__(detail or reason)
        self.reason, self.damaged = reason, damaged


@dataclass(slots=True)
class DropReason:
    """Number of lines dropped for one reason, with the first of them."""

    damaged: bool
    first_line: int
    first_detail: str
    count: int = 0


@dataclass(slots=True)
class Drops:
    """Count of dropped lines by reason."""

    num_lines: int = 0
    """Lines that were read and are not blank, without a header."""
    reasons: dict[str, DropReason] = field(default_factory=dict)

    def add(self, line: int, error: DroppedError) -> None:
        """Count a dropped line."""
        reason = self.reasons.setdefault(error.reason, DropReason(error.damaged, line, str(error)))
        reason.count += 1

    @property
    def num_dropped(self) -> int:
        """Dropped lines."""
        return sum(reason.count for reason in self.reasons.values())

    @property
    def num_damaged(self) -> int:
        """Dropped lines that are damaged."""
        return sum(reason.count for reason in self.reasons.values() if reason.damaged)

    @property
    def damaged_ratio(self) -> float:
        """Share of damaged lines in all lines."""
        return self.num_damaged / max(self.num_lines, 1)


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
    """Check a value against its range; DroppedError if it is outside, or no number."""
    if not low <= value <= high:
        expected = f"expected {_shown(low)} to {_shown(high)} {unit}".strip()
        raise DroppedError(
            f"{field} is out of range; {expected}", f"{field} is {_shown(value)}; {expected}"
        )


def check_prompt(field: str, num_tokens: int) -> None:
    """Check a prompt length; DroppedError if it is below 1 or too long."""
    in_range(field, num_tokens, 1, NUM_PROMPT_TOKENS_MAX, "tokens")


def check_output(field: str, num_tokens: int) -> None:
    """Check an output length; 0 is taken as 1, since a prefill gives a token; DroppedError if it is
    negative or too long."""
    in_range(field, num_tokens, 0, NUM_OUTPUT_TOKENS_MAX, "tokens")


def shown_name(name: str) -> str:
    """A name out of a file, short and without control characters, for messages."""
    return name[:40] if name.isprintable() else ascii(name[:40])


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.15g}"
