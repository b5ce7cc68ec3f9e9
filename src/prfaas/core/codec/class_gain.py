"""Expected ratio and rate of quality classes, for plans and simulations.

The ratio follows from the rounded form itself (`lossy.py`); rates are those of one core as measured
(docs/results/codecs.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.core.codec.gain import CodecSpeed
from prfaas.core.codec.lossy import CodedSegment, SegmentMode
from prfaas.core.codec.quality import GROUP_VALUES, Quality

HEAD_SIZE = 128
"""Channels of a head, of keys and of values, where a geometry does not name them."""
BLOCK_TOKENS = 64
"""Tokens of a block where nothing else is given: `kivi4` gains less in blocks of less than 32."""
SPEEDS = {
    Quality.FP8: CodecSpeed(1.5e9, 3.7e9),
    Quality.KIVI4: CodecSpeed(0.6e9, 1.2e9),
    Quality.STATE: CodecSpeed(2.2e9, 5.7e9),
}
"""Rate of a core by what is rounded, bytes of blocks a second, digests included: the sender codes
and decodes, the receiver decodes."""

_SECONDS_MIN = 1e-15
"""Time of a byte that is not rounded: no limit to any link."""


@dataclass(frozen=True, slots=True)
class ClassGain:
    """Effect of rounding in one class.

    Attributes:
        attention: Bytes of keys and values in bfloat16 for a byte on the link; 1 if they are not
            rounded.
        state: The same of float32 states.
        speed: Rate of a core over all bytes of a hand-off; those that are not rounded take it no
            time. None if nothing is rounded.
    """

    attention: float = 1.0
    state: float = 1.0
    speed: CodecSpeed | None = None


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
