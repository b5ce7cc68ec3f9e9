"""Field types for quantities with units."""

from __future__ import annotations

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


def _parsed(value: object, parse: object, example: str) -> int:
    if not isinstance(value, str) or not callable(parse):
        raise ValueError(f'{value!r} has no unit; write it as text, as in "{example}"')
    try:
        return int(parse(value))
    except ConfigError as error:
        raise ValueError(str(error)) from None


LIMIT_NS_MIN = 10**6


def long_enough(duration_ns: int | None) -> int | None:
    """A time limit, which has to leave time for something.

    Raises:
        ValueError: It is less than a millisecond.
    """
    if duration_ns is not None and duration_ns < LIMIT_NS_MIN:
        raise ValueError(f"{duration_ns} ns leave no time for anything; the least is 1ms")
    return duration_ns


SizeBytes = Annotated[int, BeforeValidator(_size)]
DurationNs = Annotated[int, BeforeValidator(_duration)]
RateBitsPerS = Annotated[int, BeforeValidator(_rate)]
