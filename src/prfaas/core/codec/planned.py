"""Coding of a link in plans and simulations: the rule of pool nodes for a link that is busy.

A pool node samples its link and codes while `link_rates` expects a gain (`switch.py`). A plan has
the rates instead of samples, and asks the same function.
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.codec.codecs import RATIO_MIN, RATIOS, LinkCodec, codec_of
from prfaas.core.codec.gain import GAIN_MIN, CodecSpeed, EndLoad, link_rates
from prfaas.core.codec.quality import Quality
from prfaas.core.kv.planes import Plane


@dataclass(frozen=True, slots=True)
class CodedLink:
    """A link that is busy, with what coding makes of it.

    Attributes:
        wire_bytes_per_s: Bytes that the network carries; less than its capacity where the codec is
            the limit.
        ratio: Bytes of a block for a byte on the network, of blocks that are coded; 1 while the
            link sends all raw.
        gain: Expected rate of coded blocks for that of raw ones.
    """

    wire_bytes_per_s: float
    ratio: float = 1.0
    gain: float = 1.0

    @property
    def is_coding(self) -> bool:
        """Return True if the link codes blocks."""
        return self.ratio > 1

    def ratio_of(self, dtype: str) -> float:
        """Return the bytes of a block of one dtype for a byte on the network, at least 1."""
        return self.ratio if codec_of((Plane(dtype, 1),)) else 1.0


_SPEED = CodecSpeed()


@dataclass(frozen=True, slots=True)
class PlannedCoding:
    """Coding by the pool nodes of a link.

    Attributes:
        mode: The operator's choice (`link_codec`).
        cores: Cores that code at each end, of all pool nodes of the link together. A pool node
            codes on one.
        speed: Rate of a core.
        ratio: Bytes of a block in a codable dtype for a byte on the network, at least 1.
    """

    mode: LinkCodec = LinkCodec.RAW
    cores: float = 1.0
    speed: CodecSpeed = _SPEED
    ratio: float = RATIOS["bfloat16"]

    def of(self, wire_bytes_per_s: float) -> CodedLink:
        """Return a link of this capacity, which is always busy.

        Args:
            wire_bytes_per_s: Capacity of the network; 0 is a cut.
        """
        if self.mode is LinkCodec.RAW or self.ratio < RATIO_MIN or not wire_bytes_per_s:
            return CodedLink(wire_bytes_per_s)
        end = EndLoad(cores=self.cores)
        rates = link_rates(wire_bytes_per_s, self.ratio, self.speed, end, end)
        if self.mode is LinkCodec.AUTO and rates.gain < GAIN_MIN:
            return CodedLink(wire_bytes_per_s, gain=rates.gain)
        wire = min(wire_bytes_per_s, rates.coded / self.ratio)
        return CodedLink(wire, self.ratio, rates.gain)


RAW_LINK = PlannedCoding()
"""A link that never codes."""
RATIO_WEIGHT = 0.25
"""Weight of the newest sample in the ratio that a pool node reports."""


@dataclass(frozen=True, slots=True)
class BlockCoding:
    """Coding of the blocks of a model on one link.

    Attributes:
        planned: How pool nodes code.
        kv_dtype: Format of keys and values.
        state_dtype: Format of recurrent states.
    """

    planned: PlannedCoding
    kv_dtype: str
    state_dtype: str

    def in_words(self, wire_bytes_per_s: float) -> str:
        """Return whether a link of this capacity codes, for people."""
        link = self.planned.of(wire_bytes_per_s)
        if not link.is_coding:
            return f"blocks are sent raw, coded ones would go at {link.gain:.2f} of the rate"
        ratios = (link.ratio_of(dtype) for dtype in (self.kv_dtype, self.state_dtype))
        attention, state = (f"{ratio:.2f}:1" for ratio in ratios)
        return f"attention is coded {attention}, state {state}, {Quality.LOSSLESS}"


class BlockCoder:
    """Bytes on the network for the blocks of one simulated link.

    Args:
        coding: Of its blocks.
        state_bytes: Recurrent state of a sequence, which is the end of a transfer.
    """

    def __init__(self, coding: BlockCoding, state_bytes: int) -> None:
        self._coding, self._state_bytes = coding, state_bytes
        self._link = coding.planned.of(0.0)
        self.ratio = 1.0
        """Bytes of blocks for a byte on the network, lately."""

    def set_capacity(self, wire_bytes_per_s: float) -> float:
        """Decide for a capacity; return the bytes that the network carries in a second."""
        self._link = self._coding.planned.of(wire_bytes_per_s)
        return self._link.wire_bytes_per_s

    def wire_bytes(self, num_bytes: int, *, is_last: bool) -> int:
        """Return the bytes on the network for the next blocks of a transfer.

        Args:
            num_bytes: Bytes of the blocks.
            is_last: They end the transfer.
        """
        link, coding = self._link, self._coding
        state = min(num_bytes, self._state_bytes) if is_last else 0
        attention = (num_bytes - state) / link.ratio_of(coding.kv_dtype)
        wire = round(attention + state / link.ratio_of(coding.state_dtype))
        if wire:
            self.ratio += RATIO_WEIGHT * (num_bytes / wire - self.ratio)
        return wire
