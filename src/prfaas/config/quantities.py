"""Field types for quantities with units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator

from prfaas.errors import ConfigError
from prfaas.units import parse_duration, parse_rate, parse_size


def _size(value: object) -> int:
    return _parsed(value, parse_size, "16GiB")


def _duration(value: object) -> int:
    return _parsed(value, parse_duration, "250ms")


def _rate(value: object) -> int:
    return _parsed(value, parse_rate, "10Gbps")


def _parsed(value: object, parse: Callable[[str], int], example: str) -> int:
    if not isinstance(value, str):
        raise ValueError(f'{value!r} has no unit; write it as text, as in "{example}"')
    try:
        return parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


Check = Callable[[int | None], int | None]


def at_least(least: int, said: str, shown: str = "") -> Check:
    """A check for fields: the value, or None, as it is; a `ValueError` for less.

    Args:
        least: The smallest value that makes sense.
        said: What less of it does, in words that follow the value.
        shown: `least` as an operator writes it; the number without it.
    """

    def check(value: int | None) -> int | None:
        if value is not None and value < least:
            raise ValueError(f"{value} {said}; the least is {shown or least}")
        return value

    return check


long_enough = at_least(10**6, "ns leave no time for anything", "1ms")
"""For time limits."""
holds_a_block = at_least(1 << 20, "bytes hold no block")
"""For memory and disks."""


SizeBytes = Annotated[int, BeforeValidator(_size)]
DurationNs = Annotated[int, BeforeValidator(_duration)]
RateBitsPerS = Annotated[int, BeforeValidator(_rate)]
