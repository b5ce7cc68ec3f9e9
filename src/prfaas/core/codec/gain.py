"""Effect of coding on the rate of a link.

A link carries the least of three: the network, and the I/O thread of either end, which encrypts,
moves and codes. Coding divides the bytes that the network and the encryption see by the ratio, and
adds the time of the codec at both ends. Pool nodes use it through `switch.py`, planner and
simulator through `planned.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GAIN_MIN = 1.02
"""Expected rate with coding over the rate without, below which coding is not started."""
SATURATED = 0.9
"""Share of time above which an I/O thread, and not the network, limits a link."""
CODEC_BYTES_PER_S = 2.5e9
"""Conservative rate of coding of a core in one direction without a measurement; bytes of blocks."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Rate of a codec on one core, bytes of blocks a second.

    Attributes:
        encode: At the sending end.
        decode: At the receiving end.
    """

    encode: float = CODEC_BYTES_PER_S
    decode: float = CODEC_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class EndLoad:
    """One end of a link while it carries something.

    Attributes:
        busy: Share of time, in [0, 1], in which its I/O thread ran or waited for a core; 0 if
            unknown.
        coding: Of that, the share spent coding.
        cores: Cores that code side by side.
    """

    busy: float = 0.0
    coding: float = 0.0
    cores: float = 1.0


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Expected rates of a link, bytes of blocks a second."""

    raw: float
    coded: float

    @property
    def gain(self) -> float:
        """Rate with coding for one without; 1 if nothing is known."""
        return self.coded / self.raw if self.raw else 1.0


def link_rates(
    wire_bytes_per_s: float,
    ratio: float,
    speed: CodecSpeed,
    sender: EndLoad = EndLoad(),
    receiver: EndLoad = EndLoad(),
) -> LinkRates:
    """Return what a link would carry without and with coding.

    Args:
        wire_bytes_per_s: What it carries, as the network sees it.
        ratio: Bytes of blocks for a byte on the link if coded, at least 1.
        sender: Load of the sending end at `wire_bytes_per_s`.
        receiver: The same of the receiving end.
    """
    ends = ((sender, speed.encode), (receiver, speed.decode))
    is_saturated = any(end.busy >= SATURATED for end, _ in ends)
    network = math.inf if is_saturated else wire_bytes_per_s
    raw, coded = network, network * ratio
    for end, codec in ends:
        moving = end.busy - end.coding
        thread = wire_bytes_per_s / moving if moving > 0 else math.inf
        raw = min(raw, thread)
        coded = min(coded, 1 / (1 / (thread * ratio) + 1 / (codec * end.cores)))
    return LinkRates(raw, coded)
