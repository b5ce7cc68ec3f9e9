"""Sizes, durations and rates as operators write them: "16GiB", "250ms", "10Gbps"."""

from __future__ import annotations

import re

from prfaas.errors import ConfigError

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
BITS_PER_BYTE = 8
BYTES_PER_TB = 1e12
"""Prices of links are for this number of bytes."""

_SIZE_BYTES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DURATION_NS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
}
_RATE_BITS = {"bps": 1, "kbps": 10**3, "Mbps": 10**6, "Gbps": 10**9, "Tbps": 10**12}
_MAX = 2**63 - 1
_QUANTITY = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]+)\s*")


def ns(seconds: float) -> int:
    """Whole nanoseconds of a duration in seconds."""
    return round(seconds * NS_PER_S)


def seconds_of(duration_ns: int | None) -> float | None:
    """Seconds of a duration in nanoseconds; None is unknown."""
    return None if duration_ns is None else duration_ns / NS_PER_S


def _parse(text: str, table: dict[str, int], what: str, example: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match.group(2) not in table:
        units = ", ".join(table)
        raise ConfigError(
            f'{text!r} is not a {what}; write a number and one of {units}, as in "{example}"'
        )
    found = round(float(match.group(1)) * table[match.group(2)])
    if found > _MAX:
        largest = max(table, key=table.__getitem__)
        raise ConfigError(
            f"{text!r} is too large a {what}; at most {_MAX // table[largest]:,} {largest}"
        )
    return found


def parse_size(text: str) -> int:
    """Bytes of a size such as "16GiB" or "1.5 MB".

    Raises:
        ConfigError: No number with a known unit.
    """
    return _parse(text, _SIZE_BYTES, "size", "16GiB")


def parse_duration(text: str) -> int:
    """Nanoseconds of a duration such as "250ms" or "2min".

    Raises:
        ConfigError: No number with a known unit.
    """
    return _parse(text, _DURATION_NS, "duration", "250ms")


def parse_rate(text: str) -> int:
    """Bits per second of a rate such as "10Gbps".

    Raises:
        ConfigError: No number with a known unit.
    """
    return _parse(text, _RATE_BITS, "rate", "10Gbps")


def format_size(num_bytes: int) -> str:
    """A size for people, with a binary unit: 24.1 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_rate(bits_per_s: int) -> str:
    """A rate for people, with a decimal unit: 940 Mbit/s."""
    value = float(bits_per_s)
    for unit in ("bit/s", "kbit/s", "Mbit/s"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.2f} Gbit/s"


def format_seconds(duration_ns: int) -> str:
    """A duration for people: 250 ms, 1.84 s."""
    seconds = duration_ns / NS_PER_S
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
