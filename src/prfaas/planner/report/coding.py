"""Effect of the coding of links, for every kind of output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

from prfaas.core.codec.codecs import LinkCodec
from prfaas.planner import formatting as w
from prfaas.planner.answer.coding import CodingEffect, CodingSide, LinkEffect
from prfaas.units import format_size

HEAD = ("", "raw", "coded", "change")
"""Columns of `coding_rows`."""

Row = tuple[str, str, str, str]


def coding_rows(effect: CodingEffect) -> list[Row]:
    """Return figures with all links raw, with coding, and the change."""
    raw, coded = effect.raw, effect.coded
    gains = (w.percent(raw.gain, signed=True), w.percent(coded.gain, signed=True))
    return [
        ("verdict", raw.answer.value, coded.answer.value, ""),
        ("gain at equal cost", *gains, ""),
        _row("t, tokens", w.tokens, raw.offload_threshold, coded.offload_threshold),
        _row("Λ, req/s", w.rate, raw.rate_per_s, coded.rate_per_s),
        _row("egress", w.bandwidth, raw.egress_bits_per_s, coded.egress_bits_per_s),
        _row("bytes of an offload", _size, raw.offloaded_bytes, coded.offloaded_bytes),
        _row("traffic per hour", w.price, raw.traffic_price_per_h, coded.traffic_price_per_h),
        _row("per Mtok", w.price, raw.price_per_mtoken, coded.price_per_mtoken),
    ]


CLASS_HEAD = (
    "class", "verdict", "gain", "t", "Λ/s", "egress", "an offload", "traffic/h", "per Mtok",
)  # fmt: skip
"""Columns of `class_rows`."""


def class_rows(classes: Mapping[str, CodingSide]) -> list[tuple[str, ...]]:
    """Return a row for every class."""
    return [
        (
            name,
            side.answer.value,
            w.percent(side.gain, signed=True),
            _shown(side.offload_threshold, w.tokens),
            w.rate(side.rate_per_s),
            w.bandwidth(side.egress_bits_per_s),
            _size(side.offloaded_bytes),
            w.price(side.traffic_price_per_h),
            w.price(side.price_per_mtoken),
        )
        for name, side in classes.items()
    ]


def links_in_words(effect: CodingEffect) -> str:
    """Return a clause for each link: whether it codes, and why not."""
    return "; ".join(f"{link.cluster}: {_in_words(link)}" for link in effect.links)


def _in_words(link: LinkEffect) -> str:
    if link.is_coding:
        if link.hand_off_ratio == 1:
            return "codes, but no cache of this model is bfloat16: all is sent raw"
        return f"codes {link.ratio:.2f}:1, the whole hand-off {link.hand_off_ratio:.2f}:1"
    if link.codec is LinkCodec.RAW:
        return "raw"
    return f"raw, since coded blocks would be carried at {link.gain:.2f} of the rate"


def _row(name: str, shown: Callable[[float], str], raw: float | None, coded: float | None) -> Row:
    if raw is None or coded is None:
        return name, _shown(raw, shown), _shown(coded, shown), ""
    is_comparable = raw > 0 and isfinite(raw) and isfinite(coded)
    change = w.percent(coded / raw - 1, signed=True) if is_comparable else ""
    return name, shown(raw), shown(coded), change


def _shown(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def _size(num_bytes: float) -> str:
    return format_size(round(num_bytes))
