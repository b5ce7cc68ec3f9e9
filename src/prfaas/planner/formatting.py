"""Numbers as people read them."""

from __future__ import annotations

import math

_RATES = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))


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
