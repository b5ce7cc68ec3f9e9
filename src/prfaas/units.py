"""Quantities as operators write them ("16GiB", "250ms", "10Gbps") and as people read them."""

from __future__ import annotations

import math
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
_RATES = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
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


def rate(per_s: float) -> str:
    """Requests per second, or a dash for a stage that has no load."""
    return "-" if math.isinf(per_s) else f"{per_s:.2f}"


def bandwidth(bits_per_s: float | None) -> str:
    """A bandwidth with its unit; "never" for None."""
    if bits_per_s is None:
        return "never"
    for size, unit in _RATES:
        if bits_per_s >= size:
            return f"{bits_per_s / size:.1f} {unit}"
    return f"{bits_per_s:.0f} bit/s"


def seconds(value: float) -> str:
    """A duration; "inf" when it has no bound."""
    if math.isinf(value):
        return "inf"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def between(low_s: float, high_s: float) -> str:
    """A range of durations, s; "inf" when it has no bound."""
    if math.isinf(high_s):
        return "inf"
    if high_s < 1:
        return f"{low_s * 1e3:.0f}-{high_s * 1e3:.0f} ms"
    return f"{low_s:.1f}-{high_s:.1f} s"


def percent(ratio: float, *, signed: bool = False) -> str:
    """A share or a gain; a gain is infinite when the baseline cannot do it at all."""
    if math.isinf(ratio):
        return "baseline fails"
    return f"{ratio:+.1%}" if signed else f"{ratio:.1%}"


def factor(ratio: float) -> str:
    """A factor with two digits, or all digits before the point."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2g}"


def factor_up(ratio: float) -> str:
    """Like `factor`, rounded up, for a ratio above 0 that is needed at least."""
    step = 10.0 ** min(math.floor(math.log10(ratio)) - 1, 0)
    return factor(math.ceil(ratio / step - 1e-9) * step)


def tokens(count: float | None) -> str:
    """A length in tokens, or a dash."""
    return "-" if count is None else f"{count:,.0f}"


def gpus(number: float) -> str:
    """GPUs of a fleet, with a decimal when an instance is bought in part."""
    return f"{number:.0f}" if abs(number - round(number)) < 0.05 else f"{number:.1f}"


def price(amount: float | None) -> str:
    """A price without its unit, which the plan file chose; a dash for None and without a bound."""
    return "-" if amount is None or math.isinf(amount) else f"{amount:.3g}"


def count(number: float) -> str:
    """A large count: 17 B, 3.15 M."""
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def short_bandwidth(bits_per_s: float) -> str:
    """A bandwidth as the head of a column: 2.5G, 400M."""
    for size, unit in _RATES[:3]:
        if bits_per_s >= size:
            return f"{bits_per_s / size:g}{unit[0]}"
    return f"{bits_per_s:g}"


def loss(ratio: float) -> str:
    """A share of lost segments: 0, 0.1 %."""
    return "0" if not ratio else f"{ratio * 100:g} %"
