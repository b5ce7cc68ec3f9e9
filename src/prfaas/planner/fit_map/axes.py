"""Axes of the map, and their texts: "10Gbps", "40ms", "0.1%", "0.5"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.errors import ConfigError
from prfaas.units import NS_PER_S, parse_duration, parse_rate

VALUES_MAX = 12
"""Values of an axis."""
POINTS_MAX = 4_000
"""Points of a map; each is a separate plan."""

BANDWIDTHS = "1Gbps,2.5Gbps,5Gbps,10Gbps,25Gbps,50Gbps,100Gbps,400Gbps"
RTTS = "2ms,10ms,40ms,80ms,160ms,300ms"
LOSSES = "0,0.01%,0.1%,1%"
LENGTHS = "0.25,1,4"

_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Axes:
    """Values of each axis, rising."""

    bits_per_s: tuple[float, ...]
    """Bandwidth of all links together, what transfers can use of it without loss."""
    rtt_s: tuple[float, ...]
    loss: tuple[float, ...]
    """Share of segments lost at random, in [0, 1)."""
    length_factors: tuple[float, ...]
    """Factor of the plan's prompt lengths."""

    @property
    def num_points(self) -> int:
        """Points of the map."""
        sides = (self.bits_per_s, self.rtt_s, self.loss, self.length_factors)
        return len(sides[0]) * len(sides[1]) * len(sides[2]) * len(sides[3])


def parse_axes(
    bandwidths: str = BANDWIDTHS, rtts: str = RTTS, losses: str = LOSSES, lengths: str = LENGTHS
) -> Axes:
    """Axes from lists that are separated by commas.

    Raises:
        ConfigError: A value has no unit or is out of range, a list does not rise, or the map
            becomes too large.
    """
    axes = Axes(
        _values("--bandwidths", bandwidths, _bandwidth),
        _values("--rtts", rtts, lambda text: parse_duration(text) / NS_PER_S),
        _values("--losses", losses, _loss),
        _values("--lengths", lengths, _factor),
    )
    if axes.num_points > POINTS_MAX:
        raise ConfigError(
            f"the map would have {axes.num_points:,} points, at most {POINTS_MAX:,} are planned; "
            "give fewer --bandwidths, --rtts, --losses or --lengths"
        )
    return axes


def _values(option: str, text: str, parse: Callable[[str], float]) -> tuple[float, ...]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > VALUES_MAX:
        raise ConfigError(f"{option} has {len(parts)} values; at most {VALUES_MAX} are drawn")
    try:
        found = tuple(parse(part) for part in parts)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    if list(found) != sorted(set(found)):
        raise ConfigError(f"{option} is {text!r}; the values have to rise")
    return found


def _bandwidth(text: str) -> float:
    found = parse_rate(text)
    if found <= 0:
        raise ConfigError(f'{text!r} carries nothing; a bandwidth is above 0, as in "10Gbps"')
    return float(found)


def _loss(text: str) -> float:
    number, percent = text.removesuffix("%").rstrip(), text.endswith("%")
    if not _NUMBER.fullmatch(number):
        raise ConfigError(f'{text!r} is not a loss; write a share of the segments, as in "0.1%"')
    found = float(number) / (100 if percent else 1)
    if found >= 1:
        raise ConfigError(f"{text!r} loses everything; a loss is below 100 %")
    return found


def _factor(text: str) -> float:
    if not _NUMBER.fullmatch(text) or not 0.001 <= float(text) <= 1000:
        raise ConfigError(
            f"{text!r} is not a factor of prompt lengths; it is a number from 0.001 to 1000"
        )
    return float(text)
