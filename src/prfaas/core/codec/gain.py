"""Effect of coding on the rate of a link.

A link carries the least of three: the network, and the I/O thread of either end, which encrypts,
moves and codes. Coding divides the bytes that the network and the encryption see by the ratio, and
adds the time of the codec at both ends. Pool nodes use it through `switch.py`, planner and
simulator through `planned.py`.

Expected ratio and rate of quality classes, for plans and simulations.

The ratio follows from the rounded form itself (`lossy.py`); rates are those of one core as measured
(docs/results/codecs.md).

Coding of a link in plans and simulations: the rule of pool nodes for a link that is busy.

A pool node samples its link and codes while `link_rates` expects a gain (`switch.py`). A plan has
the rates instead of samples, and asks the same function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from prfaas.core.codec.codecs import (
    GROUP_VALUES,
    RATIO_MIN,
    TYPE_RATIOS,
    CodedSegment,
    LinkCodec,
    Quality,
    SegmentMode,
    codec_of,
)
from prfaas.core.kv.blocks import Plane

GAIN_MIN = 1.02
"""Expected rate with coding over the rate without, below which coding is not started."""
SATURATED = 0.9
"""Share of time above which an I/O thread, and not the network, limits a link."""
CODEC_BYTES_PER_S = 2.5e9
"""Conservative rate of coding of a core in one direction without a measurement; bytes of blocks."""


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Rate of a codec on one core, bytes of blocks a second."""

    encode: float = CODEC_BYTES_PER_S
    """At the sending end."""
    decode: float = CODEC_BYTES_PER_S
    """At the receiving end."""


@dataclass(frozen=True, slots=True)
class EndLoad:
    """One end of a link while it carries something."""

    busy: float = 0.0
    """Share of time, in [0, 1], in which its I/O thread ran or waited for a core; 0 if unknown."""
    coding: float = 0.0
    """Of that, the share spent coding."""
    cores: float = 1.0
    """Cores that code side by side."""


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


HEAD_SIZE = 128
"""Channels of a head, of keys and of values, where a geometry does not name them."""
BLOCK_TOKENS = 64
"""Tokens of a block where nothing else is given: `kivi4` gains less in blocks of less than 32."""
SPEEDS = {
    Quality.FP8: CodecSpeed(1.5e9, 3.7e9),
    Quality.KIVI4: CodecSpeed(1.5e9, 2.5e9),
    Quality.STATE: CodecSpeed(2.2e9, 5.7e9),
}
"""Rate of a core by what is rounded, bytes of blocks a second, digests included: the sender codes
and decodes, the receiver decodes."""

_SECONDS_MIN = 1e-15
"""Time of a byte that is not rounded: no limit to any link."""


@dataclass(frozen=True, slots=True)
class ClassGain:
    """Effect of rounding in one class."""

    attention: float = 1.0
    """Bytes of keys and values in bfloat16 for a byte on the link; 1 if they are not rounded."""
    state: float = 1.0
    """The same of float32 states."""
    speed: CodecSpeed | None = None
    """Rate of a core over all bytes of a hand-off; those that are not rounded take it no time. None
    if nothing is rounded."""


NO_ROUNDING = ClassGain()


def class_gain(
    quality: Quality,
    block_tokens: int = BLOCK_TOKENS,
    *,
    has_pages: bool = True,
    attention_share: float = 1.0,
    rounding_bytes_per_s: float | None = None,
) -> ClassGain:
    """Return the effect of rounding.

    Args:
        has_pages: Keys and values can be told apart, which `kivi4` needs; latents have none.
        attention_share: Share of keys and values in the bytes of a hand-off.
        rounding_bytes_per_s: Blocks that a core rounds in a second; None is what was measured.
    """
    if not quality.is_lossy:
        return NO_ROUNDING
    attention = _attention_ratio(quality.attention, block_tokens, has_pages)
    parts = [(quality.attention, attention_share)] if attention > 1 else []
    if quality.rounds_state:
        parts.append((Quality.STATE, 1 - attention_share))
    seconds = [0.0, 0.0]
    for part, share in parts:
        rates = SPEEDS[part].encode, SPEEDS[part].decode
        for end, rate in enumerate(rates):
            seconds[end] += share / (rounding_bytes_per_s or rate)
    speed = CodecSpeed(*(1 / max(each, _SECONDS_MIN) for each in seconds)) if parts else None
    return ClassGain(attention, 2.0 if quality.rounds_state else 1.0, speed)


def _attention_ratio(attention: Quality, block_tokens: int, has_pages: bool) -> float:
    match attention:
        case Quality.FP8:
            segment = CodedSegment(SegmentMode.FP8, (GROUP_VALUES * block_tokens, 0, 0, 0))
        case Quality.KIVI4 if has_pages:
            segment = CodedSegment(SegmentMode.KIVI4, (block_tokens, 1, HEAD_SIZE, HEAD_SIZE))
        case _:
            return 1.0
    return segment.decoded_each / segment.coded_each


@dataclass(frozen=True, slots=True)
class PlannedCodedLink:
    """A link that is busy, with what coding makes of it."""

    wire_bytes_per_s: float
    """Bytes that the network carries; less than its capacity where the codec or the lanes are the
    limit."""
    ratio: float = 1.0
    """Bytes of a block for a byte on the network, of blocks that are coded without loss; 1 while
    the link sends all raw."""
    gain: float = 1.0
    """Expected rate of coded blocks for that of raw ones."""
    rounded_attention: float = 1.0
    """Bytes of keys and values in bfloat16 for a byte on the network, if they are rounded; else
    1."""
    rounded_state: float = 1.0
    """The same of float32 states."""

    @property
    def is_coding(self) -> bool:
        """Return True if the link codes or rounds blocks."""
        return max(self.ratio, self.rounded_attention, self.rounded_state) > 1

    def ratio_of(self, dtype: str) -> float:
        """Return the bytes of a block of one dtype for a byte on the network, at least 1, without
        rounding."""
        return self.ratio if codec_of((Plane(dtype, 1),)) else 1.0

    def attention_ratio(self, dtype: str) -> float:
        """Return the bytes of keys and values for a byte on the network, at least 1."""
        rounded = self.rounded_attention if dtype == "bfloat16" else 1.0
        return rounded if rounded > 1 else self.ratio_of(dtype)

    def state_ratio(self, dtype: str) -> float:
        """Return the bytes of recurrent states for a byte on the network, at least 1."""
        rounded = self.rounded_state if dtype == "float32" else 1.0
        return rounded if rounded > 1 else self.ratio_of(dtype)


_SPEED = CodecSpeed()


@dataclass(frozen=True, slots=True)
class PlannedCoding:
    """Coding by the pool nodes of a link."""

    mode: LinkCodec = LinkCodec.RAW
    """The operator's choice (`link_codec`); `raw` rounds nothing either."""
    cores: float = 1.0
    """Cores that code at each end, of all pool nodes of the link together: one a lane."""
    speed: CodecSpeed = _SPEED
    """Rate of a core."""
    ratio: float = TYPE_RATIOS["bfloat16"]
    """Bytes of a block in a codable dtype for a byte on the network, at least 1."""
    quality: Quality = Quality.LOSSLESS
    """Class of the blocks."""
    lanes: int = 1
    """I/O lanes at each end, of all pool nodes of the link together."""
    lane_bytes_per_s: float = inf
    """Bytes that one lane sends or receives, encryption included; infinite if the lanes are never
    the limit."""
    block_tokens: int = BLOCK_TOKENS
    has_pages: bool = True
    """Keys and values can be told apart in a block."""
    attention_share: float = 1.0
    """Share of keys and values in the bytes of a mean hand-off."""
    rounding_bytes_per_s: float | None = None
    """Blocks that one core rounds in a second; None is what was measured."""

    @property
    def is_raw(self) -> bool:
        """Return True if it changes nothing: blocks go as they are, and lanes are no limit."""
        return self.mode is LinkCodec.RAW and self.lane_bytes_per_s == inf

    def of(self, wire_bytes_per_s: float) -> PlannedCodedLink:
        """Return a link of this capacity, which is always busy.

        Args:
            wire_bytes_per_s: Capacity of the network; 0 is a cut.
        """
        lanes = self.lanes * self.lane_bytes_per_s
        wire = min(wire_bytes_per_s, lanes)
        if self.mode is LinkCodec.RAW or not wire:
            return PlannedCodedLink(wire)
        link = self._coded(wire_bytes_per_s, wire, lanes)
        gain = class_gain(
            self.quality,
            self.block_tokens,
            has_pages=self.has_pages,
            attention_share=self.attention_share,
            rounding_bytes_per_s=self.rounding_bytes_per_s,
        )
        if gain.speed is None:
            return link
        share, end = self.attention_share, EndLoad(wire / lanes, cores=self.cores)
        attention = gain.attention if gain.attention > 1 else link.ratio
        ratio = 1 / (share / attention + (1 - share) / gain.state)
        rates = link_rates(wire, ratio, gain.speed, end, end)
        limits = [wire_bytes_per_s, rates.coded / ratio]
        if gain.attention == 1:
            limits.append(link.wire_bytes_per_s)
        return PlannedCodedLink(min(limits), link.ratio, rates.gain, gain.attention, gain.state)

    def _coded(self, capacity: float, wire: float, lanes: float) -> PlannedCodedLink:
        """The link without rounding.

        Args:
            capacity: Of the network, bytes a second.
            wire: What network and lanes carry of raw blocks.
        """
        if self.ratio < RATIO_MIN:
            return PlannedCodedLink(wire)
        end = EndLoad(wire / lanes, cores=self.cores)
        rates = link_rates(wire, self.ratio, self.speed, end, end)
        if self.mode is LinkCodec.AUTO and rates.gain < GAIN_MIN:
            return PlannedCodedLink(wire, gain=rates.gain)
        return PlannedCodedLink(min(capacity, rates.coded / self.ratio), self.ratio, rates.gain)


RAW_LINK = PlannedCoding()
"""A link that never codes."""
RATIO_WEIGHT = 0.25
"""Weight of the newest sample in the ratio that a pool node reports."""


@dataclass(frozen=True, slots=True)
class BlockCoding:
    """Coding of the blocks of a model on one link."""

    planned: PlannedCoding
    """How pool nodes code, in the class of all that `qualities` does not name."""
    kv_dtype: str
    """Format of keys and values."""
    state_dtype: str
    """Format of recurrent states."""
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    """Class of the blocks of tenants."""

    def in_words(self, wire_bytes_per_s: float) -> str:
        """Return whether a link of this capacity codes, for people."""
        link = self.planned.of(wire_bytes_per_s)
        others = (f"; {tenant} {quality}" for tenant, quality in sorted(self.qualities.items()))
        return self._in_words(link) + "".join(others)

    def _in_words(self, link: PlannedCodedLink) -> str:
        if not link.is_coding:
            return f"blocks are sent raw, coded ones would go at {link.gain:.2f} of the rate"
        ratios = link.attention_ratio(self.kv_dtype), link.state_ratio(self.state_dtype)
        attention, state = (f"{ratio:.2f}:1" for ratio in ratios)
        return f"attention is coded {attention}, state {state}, {self.planned.quality}"


class BlockCoder:
    """Bytes on the network for the blocks of one simulated link.

    Classes differ in what the codec lets them use of the network. The link has the capacity of the
    fastest; bytes of others count as more, in the proportion of their capacities.

    Args:
        coding: Of its blocks.
        state_bytes: Recurrent state of a sequence, which is the end of a transfer.
    """

    def __init__(self, coding: BlockCoding, state_bytes: int) -> None:
        self._coding, self._state_bytes = coding, state_bytes
        every = {coding.planned.quality, *coding.qualities.values()}
        self._planned = {each: replace(coding.planned, quality=each) for each in every}
        self._links: dict[Quality, PlannedCodedLink] = {}
        self._capacity = 0.0
        self.set_capacity(0.0)
        self._num_counted = self._num_wire = 0
        self.ratio = 1.0
        """Bytes of blocks for a counted byte, lately."""

    @property
    def wire_share(self) -> float:
        """Bytes on the network for a counted byte, so far."""
        return self._num_wire / self._num_counted if self._num_counted else 1.0

    def set_capacity(self, wire_bytes_per_s: float) -> float:
        """Decide for a capacity; return the bytes that the network carries in a second."""
        self._links = {each: p.of(wire_bytes_per_s) for each, p in self._planned.items()}
        self._capacity = max(link.wire_bytes_per_s for link in self._links.values())
        return self._capacity

    def wire_bytes(self, num_bytes: int, *, is_last: bool, tenant: str = "") -> int:
        """Return the bytes on the network for the next blocks of a transfer.

        Args:
            num_bytes: Bytes of the blocks.
            is_last: They end the transfer.
        """
        link, coding = self._link_of(tenant), self._coding
        state = min(num_bytes, self._state_bytes) if is_last else 0
        attention = (num_bytes - state) / link.attention_ratio(coding.kv_dtype)
        return round(attention + state / link.state_ratio(coding.state_dtype))

    def counted_bytes(self, num_bytes: int, *, is_last: bool, tenant: str = "") -> int:
        """Return and record the bytes for which the next blocks count on the link; the arguments
        are those of `wire_bytes`."""
        wire = counted = self.wire_bytes(num_bytes, is_last=is_last, tenant=tenant)
        own = self._link_of(tenant).wire_bytes_per_s
        if own and own != self._capacity:
            counted = round(wire * self._capacity / own)
        self._num_wire += wire
        self._num_counted += counted
        if counted:
            self.ratio += RATIO_WEIGHT * (num_bytes / counted - self.ratio)
        return counted

    def _link_of(self, tenant: str) -> PlannedCodedLink:
        coding = self._coding
        return self._links[coding.qualities.get(tenant, coding.planned.quality)]
