"""Compiled kernels of the rounded forms of blocks (`core/codec/codecs.py`).

Imported once numba is wanted. Formats are in that module; numbers of more than a byte are stored as
rows of low bytes and rows of high bytes, so that nothing has to be aligned. Every rounding is exact
integer or IEEE arithmetic without contraction, so that all machines decode to the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from prfaas.core.codec.codecs import GROUP_VALUES, KIVI_GROUP
from prfaas.pool.codec.kernels import (
    _READ8,
    _READ16,
    _WRITE8,
    _WRITE16,
    Bytes,
    Words,
    _compiled,
    _inner,
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
_i16, _i32, _u8, _u16, _f32 = np.int16, np.int32, np.uint8, np.uint16, np.float32
_READ32 = types.Array(types.uint32, 1, "C", readonly=True)
_WRITE32 = types.uint32[::1]
_BASE_MIN = 17
"""Least base exponent of fp8: below it, results would be denormal in bfloat16."""
_NAN = 0x7FC0
_LARGE = 0x7E80
"""Bits of 2^126: numbers from here on, infinities and NaNs make their group of `kivi4` NaN."""
_LEVELS = 15


@_inner
def _fp8_group(values: Words, base: np.int32, into: Bytes) -> None:
    offset, cap = (
        _i32((base - _i32(14)) << _i32(7)),
        _i32(0x77) if base == _i32(254) else _i32(0x78),
    )
    for i in range(values.size):
        x = _i32(values[i])
        m = _i32(x & _i32(0x7FFF))
        t = _i32(m - offset)
        normal = _i32((t + _i32(7) + ((t >> _i32(4)) & _i32(1))) >> _i32(4))
        shift = min(_i32(_i32(5) - (t >> _i32(7))), _i32(15))
        shift = max(shift, _i32(1))
        mantissa = _i32(_i32(128) | (m & _i32(127)))
        half = _i32((_i32(1) << (shift - _i32(1))) - _i32(1) + ((mantissa >> shift) & _i32(1)))
        code = normal if t >= _i32(128) else _i32((mantissa + half) >> shift)
        code = min(code, cap)
        code = code if m >= _i32(128) else _i32(0)
        code = code if m < _i32(0x7F80) else _i32(0x7F)
        into[i] = _u8(((x >> _i32(8)) & _i32(128)) | code)


@_inner
def _fp8_base(values: Words) -> np.int32:
    top = _u16(0)
    for i in range(values.size):
        m = _u16(values[i] & _u16(0x7FFF))
        top = max(top, m if m < _u16(0x7F80) else _u16(0))
    return _i32(max(_i32(top >> _u16(7)), _i32(_BASE_MIN)))


@_compiled(types.int64(_READ16, types.int64, _WRITE8))
def encode_fp8(values: Words, size: int, into: Bytes) -> int:
    """Code bfloat16 as e4m3 with a base exponent for every group; returns bytes written.

    Args:
        size: Values of one repeat.
        into: As large as the code.
    """
    at = 0
    for start in range(0, values.size, size):
        bases = at
        at += (size + GROUP_VALUES - 1) // GROUP_VALUES
        for number, first in enumerate(range(start, start + size, GROUP_VALUES)):
            part = values[first : min(first + GROUP_VALUES, start + size)]
            base = _fp8_base(part)
            into[bases + number] = _u8(base)
            _fp8_group(part, base, into[at : at + part.size])
            at += part.size
    return at


@_inner
def _fp8_values(codes: Bytes, base: np.int32, into: Words) -> None:
    offset = _i32(base - _i32(14))
    for i in range(codes.size):
        b = _i32(codes[i])
        c, m = _i32(b & _i32(127)), _i32(b & _i32(7))
        log = _i32((_i32(1) if m >= _i32(2) else _i32(0)) + (_i32(1) if m >= _i32(4) else _i32(0)))
        low = _i32(((offset + log - _i32(2)) << _i32(7)) | ((m << (_i32(7) - log)) & _i32(127)))
        value = _i32((c << _i32(4)) + (offset << _i32(7))) if c >= _i32(8) else low
        value = value if c else _i32(0)
        value = value if c != _i32(127) else _i32(_NAN)
        into[i] = _u16((value & _i32(0x7FFF)) | ((b & _i32(128)) << _i32(8)))


@_compiled(types.int64(_READ8, types.int64, _WRITE16))
def decode_fp8(coded: Bytes, size: int, into: Words) -> int:
    """Restore what `encode_fp8` has coded, as many values as `into` has; return the bytes read."""
    at = 0
    for start in range(0, into.size, size):
        bases = at
        at += (size + GROUP_VALUES - 1) // GROUP_VALUES
        for number, first in enumerate(range(start, start + size, GROUP_VALUES)):
            part = into[first : min(first + GROUP_VALUES, start + size)]
            base = _i32(max(_i32(coded[bases + number]), _i32(_BASE_MIN)))
            _fp8_values(coded[at : at + part.size], base, part)
            at += part.size
    return at


@_inner
def _widen(values: Words, into: Ints) -> None:
    for i in range(values.size):
        into[i] = _i32(_i32(values[i]) << _i32(16))


@_inner
def _narrow(bits: Ints, into: Words) -> None:
    """Round float32 bits, which are no NaN, to bfloat16."""
    for i in range(into.size):
        b = bits[i]
        into[i] = _u16((b + _i32(0x7FFF) + ((b >> _i32(16)) & _i32(1))) >> _i32(16))


@_inner
def _ordered(x: np.uint16) -> np.int16:
    """Bits of a bfloat16 as an integer of the same order."""
    v = _i16(x)
    return v if v >= _i16(0) else _i16(v ^ _i16(0x7FFF))


@_inner
def _unordered(v: np.int16) -> np.uint16:
    return _u16(v) if v >= _i16(0) else _u16(v ^ _i16(0x7FFF))


@_inner
def _scales(
    lows: NDArray[np.int16],
    highs: NDArray[np.int16],
    ints: Ints,
    floats: Floats,
    scales: Words,
    zeros: Words,
) -> None:
    """Set scale and least value of columns from their extremes; scratch has two rows of them."""
    size = scales.size
    for c in range(size):
        is_large = highs[c] >= _i16(_LARGE) or lows[c] < _i16(-_LARGE)
        zeros[c] = _u16(0) if is_large else _unordered(lows[c])
        ints[c] = _i32(_i32(zeros[c]) << _i32(16))
        ints[size + c] = _i32(_i32(_u16(0) if is_large else _unordered(highs[c])) << _i32(16))
    for c in range(size):
        floats[c] = (floats[size + c] - floats[c]) / _f32(_LEVELS)
    _narrow(ints[:size], scales)
    for c in range(size):
        is_large = highs[c] >= _i16(_LARGE) or lows[c] < _i16(-_LARGE)
        scale = scales[c] if scales[c] >= _u16(128) else _u16(0)
        scales[c] = _u16(_NAN) if is_large else scale


@_inner
def _split(words: Words, low: Bytes, high: Bytes) -> None:
    for i in range(words.size):
        low[i], high[i] = _u8(words[i]), _u8(words[i] >> _u16(8))


@_inner
def _joined(low: Bytes, high: Bytes, into: Words) -> None:
    for i in range(into.size):
        into[i] = _u16(_u16(low[i]) | _u16(_u16(high[i]) << _u16(8)))


@_inner
def _levels(
    values: Words, ints: Ints, floats: Floats, zeros: Floats, inverse: Floats, into: Bytes
) -> None:
    _widen(values, ints)
    for c in range(values.size):
        y = (floats[c] - zeros[c]) * inverse[c] + _f32(0.5)
        y = y if y < _f32(_LEVELS) else _f32(_LEVELS)
        into[c] = _u8(_i32(y))


@_inner
def _keys(
    values: Words,
    first: int,
    stride: int,
    num: int,
    size: int,
    scratch: Ints,
    words: Words,
    order: NDArray[np.int16],
    into: Bytes,
) -> None:
    """Code `num` keys of one head; the first starts at `first`, neighbours are `stride` apart."""
    floats = scratch.view(_f32)
    lows, highs = order[:size], order[size : 2 * size]
    lows[:] = _i16(0x7FFF)
    highs[:] = _i16(-0x8000)
    for t in range(num):
        row = values[first + t * stride : first + t * stride + size]
        for c in range(size):
            v = _ordered(row[c])
            lows[c], highs[c] = min(lows[c], v), max(highs[c], v)
    scales, zeros = words[:size], words[size : 2 * size]
    _scales(lows, highs, scratch, floats, scales, zeros)
    _split(scales, into[:size], into[size : 2 * size])
    _split(zeros, into[2 * size : 3 * size], into[3 * size : 4 * size])
    inverse, least = floats[size : 2 * size], floats[2 * size : 3 * size]
    _inverse(scales, scratch[size : 2 * size], inverse)
    _widen(zeros, scratch[2 * size : 3 * size])
    low, high = np.empty(size, _u8), np.zeros(size, _u8)
    for t in range(0, num, 2):
        row = values[first + t * stride : first + t * stride + size]
        _levels(row, scratch[:size], floats[:size], least, inverse, low)
        if t + 1 < num:
            row = values[first + (t + 1) * stride : first + (t + 1) * stride + size]
            _levels(row, scratch[:size], floats[:size], least, inverse, high)
        else:
            high[:] = _u8(0)
        at = (4 + t // 2) * size
        out = into[at : at + size]
        for c in range(size):
            out[c] = _u8(low[c] | _u8(high[c] << _u8(4)))


@_inner
def _inverse(scales: Words, ints: Ints, floats: Floats) -> None:
    _widen(scales, ints)
    for c in range(scales.size):
        is_usable = scales[c] > _u16(0) and scales[c] < _u16(0x7F80)
        floats[c] = _f32(1) / floats[c] if is_usable else _f32(0)


@_inner
def _value_row(row: Words, scratch: Ints, into: Bytes) -> int:
    """Code one value of one head; return the bytes written."""
    floats, at = scratch.view(_f32), 0
    for start in range(0, row.size, KIVI_GROUP):
        part = row[start : start + KIVI_GROUP]
        low, high = _i16(0x7FFF), _i16(-0x8000)
        for c in range(part.size):
            v = _ordered(part[c])
            low, high = min(low, v), max(high, v)
        is_large = high >= _i16(_LARGE) or low < _i16(-_LARGE)
        zero = _u16(0) if is_large else _unordered(low)
        scratch[0] = _i32(_i32(zero) << _i32(16))
        scratch[1] = _i32(_i32(_u16(0) if is_large else _unordered(high)) << _i32(16))
        least = floats[0]
        floats[2] = (floats[1] - least) / _f32(_LEVELS)
        bits = scratch[2]
        scale = _u16((bits + _i32(0x7FFF) + ((bits >> _i32(16)) & _i32(1))) >> _i32(16))
        scale = scale if scale >= _u16(128) else _u16(0)
        scratch[2] = _i32(_i32(scale) << _i32(16))
        inverse = _f32(1) / floats[2] if scale > _u16(0) else _f32(0)
        scale = _u16(_NAN) if is_large else scale
        into[at], into[at + 1] = _u8(scale), _u8(scale >> _u16(8))
        into[at + 2], into[at + 3] = _u8(zero), _u8(zero >> _u16(8))
        _widen(part, scratch[4 : 4 + part.size])
        some = floats[4 : 4 + part.size]
        half = (part.size + 1) // 2
        out = into[at + 4 : at + 4 + half]
        for c in range(half):
            y = (some[c] - least) * inverse + _f32(0.5)
            y = y if y < _f32(_LEVELS) else _f32(_LEVELS)
            out[c] = _u8(_i32(y))
        for c in range(part.size - half):
            y = (some[half + c] - least) * inverse + _f32(0.5)
            y = y if y < _f32(_LEVELS) else _f32(_LEVELS)
            out[c] = _u8(out[c] | _u8(_u8(_i32(y)) << _u8(4)))
        at += 4 + half
    return at


_SIZES = (types.int64,) * 4


@_compiled(types.int64(_READ16, *_SIZES, types.boolean, _WRITE8))
def encode_kivi(
    values: Words, tokens: int, heads: int, keys: int, rest: int, by_token: bool, into: Bytes
) -> int:
    """Code keys per channel and values per token, with 4 bits; returns bytes written.

    Args:
        values: bfloat16 of all repeats.
        rest: Size of a value.
        by_token: Order of heads and tokens.
        into: As large as the code.
    """
    cell = keys + rest
    scratch = np.empty(max(3 * keys, 4 + KIVI_GROUP), _i32)
    words, order = np.empty(2 * keys, _u16), np.empty(2 * keys, _i16)
    stride = cell * heads if by_token else cell
    step = cell if by_token else cell * tokens
    at = 0
    for start in range(0, values.size, tokens * heads * cell):
        for head in range(heads):
            first = start + head * step
            for token in range(0, tokens, KIVI_GROUP):
                num = min(KIVI_GROUP, tokens - token)
                size = (4 + (num + 1) // 2) * keys
                out = into[at : at + size]
                _keys(values, first + token * stride, stride, num, keys, scratch, words, order, out)
                at += size
            for token in range(tokens):
                row = first + token * stride + keys
                at += _value_row(values[row : row + rest], scratch, into[at:])
    return at


@_inner
def _restored(
    codes: Bytes,
    is_high: bool,
    scales: Words,
    zeros: Floats,
    factors: Floats,
    ints: Ints,
    floats: Floats,
    into: Words,
) -> None:
    for c in range(into.size):
        q = _u8(codes[c] >> _u8(4)) if is_high else _u8(codes[c] & _u8(15))
        floats[c] = zeros[c] + _f32(_i32(q)) * factors[c]
    _narrow(ints, into)
    for c in range(into.size):
        into[c] = into[c] if scales[c] < _u16(0x7F80) else _u16(_NAN)


@_inner
def _restore_keys(
    coded: Bytes,
    num: int,
    size: int,
    scratch: Ints,
    words: Words,
    first: int,
    stride: int,
    into: Words,
) -> None:
    floats = scratch.view(_f32)
    scales, zeros = words[:size], words[size : 2 * size]
    _joined(coded[:size], coded[size : 2 * size], scales)
    _joined(coded[2 * size : 3 * size], coded[3 * size : 4 * size], zeros)
    _widen(scales, scratch[size : 2 * size])
    _widen(zeros, scratch[2 * size : 3 * size])
    for t in range(num):
        at = (4 + t // 2) * size
        _restored(
            coded[at : at + size],
            t % 2 == 1,
            scales,
            floats[2 * size : 3 * size],
            floats[size : 2 * size],
            scratch[:size],
            floats[:size],
            into[first + t * stride : first + t * stride + size],
        )


@_inner
def _restore_value(coded: Bytes, scratch: Ints, row: Words) -> int:
    floats, at = scratch.view(_f32), 0
    for start in range(0, row.size, KIVI_GROUP):
        part = row[start : start + KIVI_GROUP]
        scale = _u16(_u16(coded[at]) | _u16(_u16(coded[at + 1]) << _u16(8)))
        zero = _u16(_u16(coded[at + 2]) | _u16(_u16(coded[at + 3]) << _u16(8)))
        scratch[0], scratch[1] = _i32(_i32(scale) << _i32(16)), _i32(_i32(zero) << _i32(16))
        factor, least = floats[0], floats[1]
        half = (part.size + 1) // 2
        codes = coded[at + 4 : at + 4 + half]
        some = floats[4 : 4 + part.size]
        for c in range(half):
            some[c] = least + _f32(_i32(codes[c] & _u8(15))) * factor
        for c in range(part.size - half):
            some[half + c] = least + _f32(_i32(codes[c] >> _u8(4))) * factor
        _narrow(scratch[4 : 4 + part.size], part)
        if scale >= _u16(0x7F80):
            part[:] = _u16(_NAN)
        at += 4 + half
    return at


@_compiled(types.int64(_READ8, *_SIZES, types.boolean, _WRITE16))
def decode_kivi(
    coded: Bytes, tokens: int, heads: int, keys: int, rest: int, by_token: bool, into: Words
) -> int:
    """Restore what `encode_kivi` has coded, as many values as `into` has; return the bytes read."""
    cell = keys + rest
    scratch, words = np.empty(max(3 * keys, 4 + KIVI_GROUP), _i32), np.empty(2 * keys, _u16)
    stride = cell * heads if by_token else cell
    step = cell if by_token else cell * tokens
    at = 0
    for start in range(0, into.size, tokens * heads * cell):
        for head in range(heads):
            first = start + head * step
            for token in range(0, tokens, KIVI_GROUP):
                num = min(KIVI_GROUP, tokens - token)
                size = (4 + (num + 1) // 2) * keys
                _restore_keys(
                    coded[at : at + size],
                    num,
                    keys,
                    scratch,
                    words,
                    first + token * stride,
                    stride,
                    into,
                )
                at += size
            for token in range(tokens):
                row = first + token * stride + keys
                at += _restore_value(coded[at:], scratch, into[row : row + rest])
    return at


@_compiled(types.int64(_READ32, _WRITE8))
def encode_state(values: NDArray[np.uint32], into: Bytes) -> int:
    """Round float32 to bfloat16; return the bytes written."""
    size = values.size
    low, high = into[:size], into[size : 2 * size]
    for i in range(size):
        v = values[i]
        rounded = np.uint32(v + np.uint32(0x7FFF) + ((v >> np.uint32(16)) & np.uint32(1)))
        is_nan = np.uint32(v & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        kept = np.uint32(v | np.uint32(0x400000)) if is_nan else rounded
        low[i], high[i] = _u8(kept >> np.uint32(16)), _u8(kept >> np.uint32(24))
    return 2 * size


@_compiled(types.int64(_READ8, _WRITE32))
def decode_state(coded: Bytes, into: NDArray[np.uint32]) -> int:
    """Restore what `encode_state` has rounded; return the bytes read."""
    size = into.size
    low, high = coded[:size], coded[size : 2 * size]
    for i in range(size):
        into[i] = np.uint32(
            np.uint32(np.uint32(low[i]) << np.uint32(16))
            | np.uint32(np.uint32(high[i]) << np.uint32(24))
        )
    return 2 * size
