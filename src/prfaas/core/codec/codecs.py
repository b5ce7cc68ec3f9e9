"""The codecs that a link can use, and what each is expected to gain.

`exponent-window` codes bfloat16: of each number the sign and the mantissa are kept, the exponent is
replaced by its distance from the largest exponent nearby, 4 bits, and the few numbers that are too
small for that carry their exponent beside. 16 bits become 12, and nothing is lost. Weights, keys
and values of trained models have exponents within such a window (Zipf-like, entropy 2.5 to 3 bits:
DFloat11, arXiv 2504.11651; ZipNN, arXiv 2411.05239). float32 state gains 4 to 6 % by anything
lossless and is sent as it is.

Quality classes of KV blocks: how much of a block may be lost on a link.

A block whose bytes were rounded taints every block that is computed after it. So the class is part
of the salt of block names (`core/kv/tenant_salts.py`): blocks of two classes never have one name.

The rounded form of a block: which parts are rounded, how, and how long it is.

A block is sent as one stream: a head, then its segments in order. The head describes them, so a
stream can be decoded without the layout; its length follows from it, whatever the numbers are.

    segments u16 | for each: mode u8, order u8, repeats u32, four sizes u32

| mode | sizes | body of one repeat |
|---|---|---|
| raw | bytes | the bytes |
| fp8 | values | a base exponent for every 128 values; a byte for every value |
| kivi4 | tokens, heads, key size, value size | for each head: keys, then values |
| state | values | bfloat16 for every float32 |

Keys of `kivi4` (arXiv 2402.02750): for every 32 tokens a scale and the least value of each channel,
in bfloat16, then 4 bits a value, two tokens in a byte. Values: for every token and 32 channels the
same two numbers, then 4 bits a value, two channels in a byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import groupby

from prfaas.core.kv.blocks import CacheGroup, GroupKind, KvPage, Planes
from prfaas.errors import PeerError
from prfaas.units import BITS_PER_BYTE

STATE_SUFFIX = "+bf16-state"


class Quality(StrEnum):
    """Quality class, by the operator's word only."""

    LOSSLESS = "lossless"
    """Every bit arrives."""
    FP8 = "fp8"
    """Keys and values of attention with 8 bits (e4m3) and a scale for 128 numbers."""
    KIVI4 = "kivi4"
    """Keys and values of attention with 4 bits: keys per channel, values per token."""
    FP8_STATE = "fp8+bf16-state"
    """The same as `fp8`, and float32 states as bfloat16."""
    KIVI4_STATE = "kivi4+bf16-state"
    """The same as `kivi4`, and float32 states as bfloat16."""
    STATE = "bf16-state"
    """float32 states as bfloat16; attention as it is."""

    @property
    def attention(self) -> Quality:
        """Class of keys and values: `lossless`, `fp8` or `kivi4`."""
        return Quality.LOSSLESS if self is Quality.STATE else Quality(self.split("+")[0])

    @property
    def rounds_state(self) -> bool:
        """Return True if float32 states are sent as bfloat16."""
        return self is Quality.STATE or self.endswith(STATE_SUFFIX)

    @property
    def with_state(self) -> Quality:
        """The class that rounds float32 states as well."""
        attention = self.attention
        return Quality(attention + STATE_SUFFIX) if attention.is_lossy else Quality.STATE

    @property
    def is_lossy(self) -> bool:
        """Return True if blocks of this class may be rounded."""
        return self is not Quality.LOSSLESS


GROUP_VALUES = 128
"""Numbers under one scale in `fp8`."""
KIVI_GROUP = 32
"""Tokens (keys) or channels (values) under one scale in `kivi4`."""
_KIVI_BITS = 4 + 2 * 16 / KIVI_GROUP
RATIOS = {
    Quality.FP8: 16 / (BITS_PER_BYTE * (1 + 1 / GROUP_VALUES)),
    Quality.KIVI4: 16 / _KIVI_BITS,
}
"""Bytes of a bfloat16 block of attention for a byte on the link; blocks of fewer than 32 tokens
gain less with `kivi4`."""


LOSSY = "rounded-1"
"""Name in the hello of a link; another format would have another name."""
LOSSY_NUMBER = 2
"""Number in a fragment. Never reused."""
SEGMENTS_MAX = 512
_COUNT, _SEGMENT = struct.Struct("<H"), struct.Struct("<BBIIIII")
_SIZE_MAX = 1 << 28


class SegmentMode(IntEnum):
    """Coding of a segment."""

    RAW = 0
    FP8 = 1
    KIVI4 = 2
    STATE = 3


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """Neighbouring bytes of a block that are coded alike."""

    mode: SegmentMode
    sizes: tuple[int, int, int, int]
    """Four numbers by mode; unused ones are 0."""
    repeats: int = 1
    """Number of layers that are the same, one after the other."""
    is_token_major: bool = False
    """Order of heads and tokens, of `kivi4` only."""

    @property
    def decoded_each(self) -> int:
        """Bytes of a block in one repeat."""
        first, heads, keys, values = self.sizes
        match self.mode:
            case SegmentMode.RAW:
                return first
            case SegmentMode.FP8:
                return 2 * first
            case SegmentMode.STATE:
                return 4 * first
            case SegmentMode.KIVI4:
                return 2 * first * heads * (keys + values)

    @property
    def coded_each(self) -> int:
        """Bytes of a stream in one repeat."""
        first, heads, keys, values = self.sizes
        match self.mode:
            case SegmentMode.RAW:
                return first
            case SegmentMode.FP8:
                return first + math.ceil(first / GROUP_VALUES)
            case SegmentMode.STATE:
                return 2 * first
            case SegmentMode.KIVI4:
                return heads * (_grouped(first, keys) + first * _grouped(values, 1))


def _grouped(length: int, width: int) -> int:
    """Bytes of `width` columns of `length` numbers, grouped along the length."""
    full, rest = divmod(length, KIVI_GROUP)
    num_bytes = full * (4 + KIVI_GROUP // 2)
    return width * (num_bytes + (4 + (rest + 1) // 2 if rest else 0))


@dataclass(frozen=True, slots=True)
class Form:
    """Form of the blocks of a cache group in one quality class."""

    segments: tuple[CodedSegment, ...]
    """Of a block, in order."""

    @property
    def head(self) -> bytes:
        """Start of every stream."""
        parts = (
            _SEGMENT.pack(each.mode, each.is_token_major, each.repeats, *each.sizes)
            for each in self.segments
        )
        return _COUNT.pack(len(self.segments)) + b"".join(parts)

    @property
    def decoded_bytes(self) -> int:
        """Size of a block."""
        return sum(each.repeats * each.decoded_each for each in self.segments)

    @property
    def coded_bytes(self) -> int:
        """Size of a stream."""
        bodies = sum(each.repeats * each.coded_each for each in self.segments)
        return _COUNT.size + _SEGMENT.size * len(self.segments) + bodies

    @property
    def is_aligned(self) -> bool:
        """Return True if every segment starts at a multiple of the size of its numbers."""
        at, widths = 0, {SegmentMode.RAW: 1, SegmentMode.STATE: 4}
        for each in self.segments:
            if at % widths.get(each.mode, 2):
                return False
            at += each.repeats * each.decoded_each
        return True

    @property
    def modes(self) -> frozenset[SegmentMode]:
        """Codings that lose something."""
        return frozenset(each.mode for each in self.segments) - {SegmentMode.RAW}


_MODES = {
    Quality.FP8: frozenset({SegmentMode.FP8}),
    Quality.KIVI4: frozenset({SegmentMode.KIVI4}),
    Quality.FP8_STATE: frozenset({SegmentMode.FP8, SegmentMode.STATE}),
    Quality.KIVI4_STATE: frozenset({SegmentMode.KIVI4, SegmentMode.STATE}),
    Quality.STATE: frozenset({SegmentMode.STATE}),
}


def allows(quality: Quality, modes: frozenset[SegmentMode]) -> bool:
    """Return True if blocks of a class may be rounded like this."""
    return modes <= _MODES.get(quality, frozenset())


def read_head(stream: bytes | memoryview, block_bytes: int) -> tuple[Form, int]:
    """Return the form that a stream claims, and where its first body starts.

    Raises:
        PeerError: It is none, or not of exactly this stream and a block of exactly this size.
    """
    (count,) = _COUNT.unpack_from(stream) if len(stream) >= _COUNT.size else (0,)
    end = _COUNT.size + count * _SEGMENT.size
    if not 1 <= count <= SEGMENTS_MAX or end > len(stream):
        raise PeerError(
            f"a rounded block of {len(stream)} bytes has {count} segments; the limits are 1 to "
            f"{SEGMENTS_MAX}, within the block"
        )
    segments = tuple(_segment(stream, _COUNT.size + i * _SEGMENT.size) for i in range(count))
    form = Form(segments)
    if (form.decoded_bytes, form.coded_bytes) != (block_bytes, len(stream)):
        raise PeerError(
            f"a rounded block of {len(stream)} bytes claims {form.coded_bytes}, decoded "
            f"{form.decoded_bytes}; its block has {block_bytes}"
        )
    if not form.is_aligned:
        raise PeerError("a segment of a rounded block starts within a number")
    return form, end


def _segment(stream: bytes | memoryview, at: int) -> CodedSegment:
    mode, order, repeats, *sizes = _SEGMENT.unpack_from(stream, at)
    used = 4 if mode == SegmentMode.KIVI4 else 1
    is_sized = all(1 <= size <= _SIZE_MAX for size in sizes[:used]) and not any(sizes[used:])
    is_ordered = order == 0 or (order == 1 and mode == SegmentMode.KIVI4)
    if mode > max(SegmentMode) or not is_sized or not is_ordered or not 1 <= repeats <= _SIZE_MAX:
        raise PeerError(
            f"a segment of a rounded block has mode {mode}, order {order}, {repeats} repeats of "
            f"{sizes}"
        )
    first, second, third, fourth = sizes
    return CodedSegment(SegmentMode(mode), (first, second, third, fourth), repeats, bool(order))


@dataclass(frozen=True, slots=True)
class UncodedGroup:
    """A cache group that a class leaves as it is."""

    reason: str
    is_meant: bool = False
    """The class leaves groups of this kind alone; False if the operator asked for more than the
    group can take."""


def form_of(group: CacheGroup, quality: Quality) -> Form | UncodedGroup:
    """Return the form of a group's blocks in a class, or why they stay as they are."""
    if not quality.is_lossy:
        return UncodedGroup("the class is lossless", is_meant=True)
    found = _state(group, quality) if group.kind is GroupKind.LINEAR_STATE else _kv(group, quality)
    if isinstance(found, Form) and found.coded_bytes >= found.decoded_bytes:
        return UncodedGroup("its blocks are too small to gain anything")
    return found


def _state(group: CacheGroup, quality: Quality) -> Form | UncodedGroup:
    if not quality.rounds_state:
        return UncodedGroup("linear state is not rounded without bf16-state", is_meant=True)
    return _planes(group, "float32", SegmentMode.STATE, 4)


def _kv(group: CacheGroup, quality: Quality) -> Form | UncodedGroup:
    match quality.attention:
        case Quality.FP8:
            return _planes(group, "bfloat16", SegmentMode.FP8, 2)
        case Quality.KIVI4:
            return _pages(group)
        case _:
            return UncodedGroup("attention is not rounded by bf16-state alone", is_meant=True)


def _planes(group: CacheGroup, dtype: str, mode: SegmentMode, width: int) -> Form | UncodedGroup:
    if not group.planes:
        return UncodedGroup("the types of the numbers in its blocks are not known")
    types = sorted({plane.dtype for plane in group.planes})
    if dtype not in types:
        return UncodedGroup(f"its blocks are in {', '.join(types)}, not in {dtype}")
    segments = list[CodedSegment]()
    for plane in group.planes:
        whole = plane.num_bytes // width if plane.dtype == dtype else 0
        if whole:
            segments.append(CodedSegment(mode, (whole, 0, 0, 0)))
        if plane.num_bytes > whole * width:
            segments.append(
                CodedSegment(SegmentMode.RAW, (plane.num_bytes - whole * width, 0, 0, 0))
            )
    return _form(segments)


def _pages(group: CacheGroup) -> Form | UncodedGroup:
    types = sorted({plane.dtype for plane in group.planes} - {"bfloat16"})
    if types:
        return UncodedGroup(f"its blocks are in {', '.join(types)}, not in bfloat16")
    if not group.pages:
        return UncodedGroup("keys and values cannot be told apart in its blocks")
    return _form([_page(page) for page in group.pages])


def _page(page: KvPage) -> CodedSegment:
    sizes = page.tokens, page.heads, page.key_size, page.value_size
    return CodedSegment(SegmentMode.KIVI4, sizes, page.layers, page.is_token_major)


def _form(segments: Sequence[CodedSegment]) -> Form | UncodedGroup:
    joined = [(each, sum(1 for _ in same)) for each, same in groupby(segments)]
    if len(joined) > SEGMENTS_MAX:
        return UncodedGroup(f"its blocks have {len(joined)} segments; the limit is {SEGMENTS_MAX}")
    form = Form(
        tuple(
            CodedSegment(each.mode, each.sizes, each.repeats * count, each.is_token_major)
            for each, count in joined
        )
    )
    return form if form.is_aligned else UncodedGroup("numbers in its blocks lie at odd addresses")


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
TYPE_RATIOS = {"bfloat16": 1.33}
"""Expected bytes of a block for a byte on the link, by dtype; others have 1."""
RATIO_MIN = 1.03
"""Below it, a fragment or group is sent raw: headers and time would eat the gain."""


def expected_ratio(planes: Planes) -> float:
    """Return the bytes of a block for a byte on the link, at least 1; 1 for unknown planes."""
    before = sum(plane.num_bytes for plane in planes)
    after = sum(plane.num_bytes / TYPE_RATIOS.get(plane.dtype, 1.0) for plane in planes)
    return before / after if after else 1.0


def codec_of(planes: Planes) -> str | None:
    """Return the name of the codec for blocks with these planes; None if they go raw."""
    if expected_ratio(planes) < RATIO_MIN:
        return None
    return next((CODABLE[plane.dtype] for plane in planes if plane.dtype in CODABLE), None)
