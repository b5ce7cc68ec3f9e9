"""The codecs that a link can use, and what each is expected to gain.

`exponent-window` codes bfloat16: of each number the sign and the mantissa are kept, the exponent is
replaced by its distance from the largest exponent nearby, 4 bits, and the few numbers that are too
small for that carry their exponent beside. 16 bits become 12, and nothing is lost. Weights, keys
and values of trained models have exponents within such a window (Zipf-like, entropy 2.5 to 3 bits:
DFloat11, arXiv 2504.11651; ZipNN, arXiv 2411.05239). float32 state gains 4 to 6 % by anything
lossless and is sent as it is.
"""

from __future__ import annotations

from enum import StrEnum

from prfaas.core.codec.lossy import LOSSY, LOSSY_NUMBER
from prfaas.core.kv.planes import Planes


class LinkCodec(StrEnum):
    """The operator's choice for a link (`link_codec`)."""

    AUTO = "auto"
    """Code while that is expected to raise the rate of the link."""
    RAW = "raw"
    """Never code; coded blocks are not accepted either."""
    ALWAYS = "always"
    """Code whatever shrinks, at any rate. For measurements, and for links that are paid by the
    byte."""


EXPONENT_WINDOW = "exponent-window-1"
"""Name in the hello of a link; another bit format would have another name."""
RAW_NUMBER, EXPONENT_WINDOW_NUMBER = 0, 1
NUMBERS = {EXPONENT_WINDOW: EXPONENT_WINDOW_NUMBER, LOSSY: LOSSY_NUMBER}
"""Number of each codec in a fragment. Never reused."""
CODABLE = {"bfloat16": EXPONENT_WINDOW}
"""Codec by dtype; all others are sent raw."""
RATIOS = {"bfloat16": 1.33}
"""Expected bytes of a block for a byte on the link, by dtype; others have 1."""
RATIO_MIN = 1.03
"""Below it, a fragment or group is sent raw: headers and time would eat the gain."""


def expected_ratio(planes: Planes) -> float:
    """Return the bytes of a block for a byte on the link, at least 1; 1 for unknown planes."""
    before = sum(plane.num_bytes for plane in planes)
    after = sum(plane.num_bytes / RATIOS.get(plane.dtype, 1.0) for plane in planes)
    return before / after if after else 1.0


def codec_of(planes: Planes) -> str | None:
    """Return the name of the codec for blocks with these planes; None if they go raw."""
    if expected_ratio(planes) < RATIO_MIN:
        return None
    return next((CODABLE[plane.dtype] for plane in planes if plane.dtype in CODABLE), None)
