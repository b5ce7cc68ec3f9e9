"""Instants as traces write them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

from prfaas.traces import limits
from prfaas.traces.checks import in_range
from prfaas.traces.drops import DroppedError
from prfaas.units import NS_PER_S

_CALENDAR = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_NUMBER = re.compile(r"[+-]?\d{1,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?", re.ASCII)


def calendar_ns(column: str, text: str) -> int:
    """Nanoseconds since 1970 of a date and time, exact to nine digits of the second.

    Args:
        text: As in "2023-11-16 18:15:46.6805900" or "2024-05-10 00:00:00.009930+00:00"; without a
            time zone it is UTC.

    Raises:
        DroppedError: The value is invalid.
    """
    match = _CALENDAR.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        seconds = _seconds(match[1], match[3] or "")
    except ValueError:
        raise DroppedError(
            f"{column} is no date and time",
            f"{column} is {text[:40]!a}; expected as in '2023-11-16 18:15:46.6805900', "
            "with or without a time zone",
        ) from None
    return seconds * NS_PER_S + int((match[2] or "0")[:9].ljust(9, "0"))


@lru_cache(maxsize=4096)
def _seconds(whole: str, zone: str) -> int:
    instant = datetime.fromisoformat(whole + zone)
    return round((instant if zone else instant.replace(tzinfo=UTC)).timestamp())


def seconds_ns(column: str, text: str) -> int:
    """Nanoseconds of a number of seconds from any origin.

    Args:
        text: A decimal number, 0 or more.

    Raises:
        DroppedError: The value is invalid.
    """
    if not _NUMBER.fullmatch(text):
        raise DroppedError(
            f"{column} is no number",
            f"{column} is {text[:40]!a}; expected seconds as a number",
        )
    value = float(text)
    in_range(column, value, 0, limits.INSTANT_S_MAX, "s")
    return round(value * NS_PER_S)
