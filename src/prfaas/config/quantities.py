"""Types of a deployment file: the base of its tables, and quantities with units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from prfaas.toml_tables import quantity
from prfaas.units import format_seconds, format_size, parse_duration, parse_rate, parse_size


def _size(value: object) -> int:
    return quantity(value, parse_size, "16GiB")


def _duration(value: object) -> int:
    return quantity(value, parse_duration, "250ms")


def _rate(value: object) -> int:
    return quantity(value, parse_rate, "10Gbps")


Check = Callable[[int | None], int | None]


def at_least(least: int, said: str, shown: str = "", form: Callable[[int], str] = str) -> Check:
    """A check for fields: the value, or None, as it is; a `ValueError` for less.

    Args:
        least: The smallest value that makes sense.
        said: What less of it does, in words that follow the value.
        shown: `least` as an operator writes it; the number without it.
        form: Value for people, with its unit.
    """

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise ValueError(f"{form(value)} {said}; the least is {shown or least}")
        return value

    return check


long_enough = at_least(10**6, "leave no time for anything", "1ms", format_seconds)
"""Minimum of time limits."""
age_long_enough = at_least(
    60 * 10**9, "are too short for an age known to 10 s", "1min", format_seconds
)
"""Minimum of maximum ages of blocks."""
holds_a_block = at_least(1 << 20, "hold no block", "1MiB", format_size)
"""Minimum of memory and disk sizes."""


SizeBytes = Annotated[int, BeforeValidator(_size)]
DurationNs = Annotated[int, BeforeValidator(_duration)]
RateBitsPerS = Annotated[int, BeforeValidator(_rate)]


class Table(BaseModel):
    """A table: unknown keys are errors, and values have exactly the declared type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
