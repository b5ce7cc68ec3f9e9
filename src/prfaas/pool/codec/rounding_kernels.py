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

Orders = NDArray[np.int16]
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
def _float(bits: np.uint16) -> np.float32:
    return _i32(_i32(bits) << _i32(16)).view(np.float32)


@_inner
def _rounded(value: np.float32) -> np.uint16:
    """Bits of a float32, which is no NaN, as bfloat16."""
    bits = _f32(value).view(np.int32)
    return _u16((bits + _i32(0x7FFF) + ((bits >> _i32(16)) & _i32(1))) >> _i32(16))


@_inner
def _ordered(x: np.uint16) -> np.int16:
    """Bits of a bfloat16 as an integer of the same order."""
    v = _i16(x)
    return v if v >= _i16(0) else _i16(v ^ _i16(0x7FFF))


@_inner
def _unordered(v: np.int16) -> np.uint16:
    return _u16(v) if v >= _i16(0) else _u16(v ^ _i16(0x7FFF))


@_inner
def _scales(lows: Orders, highs: Orders, scales: Words, zeros: Words, inverse: Floats) -> None:
    """Set scale, least value and 1 / scale of groups from their extremes."""
    for c in range(scales.size):
        is_large = highs[c] >= _i16(_LARGE) or lows[c] < _i16(-_LARGE)
        zero = _u16(0) if is_large else _unordered(lows[c])
        high = _u16(0) if is_large else _unordered(highs[c])
        scale = _rounded((_float(high) - _float(zero)) / _f32(_LEVELS))
        scale = scale if scale >= _u16(128) else _u16(0)
        zeros[c] = zero
        inverse[c] = _f32(1) / _float(scale) if scale > _u16(0) else _f32(0)
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
def _level(value: np.uint16, least: np.float32, inverse: np.float32) -> np.uint8:
    y = (_float(value) - least) * inverse + _f32(0.5)
    return _u8(_i32(y if y < _f32(_LEVELS) else _f32(_LEVELS)))


@_inner
def _keys(
    values: Words,
    first: int,
    stride: int,
    num: int,
    size: int,
    words: Words,
    order: Orders,
    inverse: Floats,
    into: Bytes,
) -> None:
    """Code `num` keys of one head; the first starts at `first`, neighbours are `stride` apart."""
    lows, highs = order[:size], order[size : 2 * size]
    lows[:] = _i16(0x7FFF)
    highs[:] = _i16(-0x8000)
    for t in range(num):
        row = values[first + t * stride : first + t * stride + size]
        for c in range(size):
            v = _ordered(row[c])
            lows[c], highs[c] = min(lows[c], v), max(highs[c], v)
    scales, zeros, inverse = words[:size], words[size : 2 * size], inverse[:size]
    _scales(lows, highs, scales, zeros, inverse)
    _split(scales, into[:size], into[size : 2 * size])
    _split(zeros, into[2 * size : 3 * size], into[3 * size : 4 * size])
    for t in range(num):
        row = values[first + t * stride : first + t * stride + size]
        at = (4 + t // 2) * size
        out = into[at : at + size]
        if t % 2:
            for c in range(size):
                level = _level(row[c], _float(zeros[c]), inverse[c])
                out[c] = _u8(out[c] | _u8(level << _u8(4)))
        else:
            for c in range(size):
                out[c] = _level(row[c], _float(zeros[c]), inverse[c])


@_inner
def _values(
    values: Words,
    first: int,
    stride: int,
    num: int,
    size: int,
    words: Words,
    order: Orders,
    inverse: Floats,
    into: Bytes,
) -> int:
    """Code `num` values of one head; return the bytes written."""
    groups, lows, highs = 0, order[: order.size // 2], order[order.size // 2 :]
    for t in range(num):
        row = values[first + t * stride : first + t * stride + size]
        for start in range(0, size, KIVI_GROUP):
            part = row[start : start + KIVI_GROUP]
            low, high = _i16(0x7FFF), _i16(-0x8000)
            for c in range(part.size):
                v = _ordered(part[c])
                low, high = min(low, v), max(high, v)
            lows[groups], highs[groups] = low, high
            groups += 1
    scales, zeros, inverse = words[:groups], words[groups : 2 * groups], inverse[:groups]
    _scales(lows, highs, scales, zeros, inverse)
    group = at = 0
    for t in range(num):
        row = values[first + t * stride : first + t * stride + size]
        for start in range(0, size, KIVI_GROUP):
            part = row[start : start + KIVI_GROUP]
            scale, zero = scales[group], zeros[group]
            into[at], into[at + 1] = _u8(scale), _u8(scale >> _u16(8))
            into[at + 2], into[at + 3] = _u8(zero), _u8(zero >> _u16(8))
            half = (part.size + 1) // 2
            out = into[at + 4 : at + 4 + half]
            _packed(part[:half], part[half:], _float(zero), inverse[group], out)
            at += 4 + half
            group += 1
    return at


@_inner
def _packed(
    first: Words, second: Words, least: np.float32, inverse: np.float32, into: Bytes
) -> None:
    for c in range(second.size):
        high = _u8(_level(second[c], least, inverse) << _u8(4))
        into[c] = _u8(_level(first[c], least, inverse) | high)
    for c in range(second.size, first.size):
        into[c] = _level(first[c], least, inverse)


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
    most = max(keys, KIVI_GROUP * ((rest + KIVI_GROUP - 1) // KIVI_GROUP))
    words, order = np.empty(2 * most, _u16), np.empty(2 * most, _i16)
    inverse = np.empty(most, _f32)
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
                row = first + token * stride
                _keys(values, row, stride, num, keys, words, order, inverse, out)
                at += size
            for token in range(0, tokens, KIVI_GROUP):
                num, row = min(KIVI_GROUP, tokens - token), first + token * stride + keys
                out = into[at:]
                at += _values(values, row, stride, num, rest, words, order, inverse, out)
    return at


@_inner
def _restored(code: np.uint8, scale: np.uint16, zero: np.uint16) -> np.uint16:
    value = _rounded(_float(zero) + _f32(_i32(code)) * _float(scale))
    return value if scale < _u16(0x7F80) else _u16(_NAN)


@_inner
def _restore_keys(
    coded: Bytes, num: int, size: int, words: Words, first: int, stride: int, into: Words
) -> None:
    scales, zeros = words[:size], words[size : 2 * size]
    _joined(coded[:size], coded[size : 2 * size], scales)
    _joined(coded[2 * size : 3 * size], coded[3 * size : 4 * size], zeros)
    for t in range(num):
        at, row = (4 + t // 2) * size, first + t * stride
        codes, out = coded[at : at + size], into[row : row + size]
        if t % 2:
            for c in range(size):
                out[c] = _restored(_u8(codes[c] >> _u8(4)), scales[c], zeros[c])
        else:
            for c in range(size):
                out[c] = _restored(_u8(codes[c] & _u8(15)), scales[c], zeros[c])


@_inner
def _restore_value(coded: Bytes, row: Words) -> int:
    at = 0
    for start in range(0, row.size, KIVI_GROUP):
        part = row[start : start + KIVI_GROUP]
        scale = _u16(_u16(coded[at]) | _u16(_u16(coded[at + 1]) << _u16(8)))
        zero = _u16(_u16(coded[at + 2]) | _u16(_u16(coded[at + 3]) << _u16(8)))
        half = (part.size + 1) // 2
        codes, low, high = coded[at + 4 : at + 4 + half], part[:half], part[half:]
        for c in range(low.size):
            low[c] = _restored(_u8(codes[c] & _u8(15)), scale, zero)
        for c in range(high.size):
            high[c] = _restored(_u8(codes[c] >> _u8(4)), scale, zero)
        at += 4 + half
    return at


@_compiled(types.int64(_READ8, *_SIZES, types.boolean, _WRITE16))
def decode_kivi(
    coded: Bytes, tokens: int, heads: int, keys: int, rest: int, by_token: bool, into: Words
) -> int:
    """Restore what `encode_kivi` has coded, as many values as `into` has; return the bytes read."""
    cell, words = keys + rest, np.empty(2 * keys, _u16)
    stride = cell * heads if by_token else cell
    step = cell if by_token else cell * tokens
    at = 0
    for start in range(0, into.size, tokens * heads * cell):
        for head in range(heads):
            first = start + head * step
            for token in range(0, tokens, KIVI_GROUP):
                num = min(KIVI_GROUP, tokens - token)
                size = (4 + (num + 1) // 2) * keys
                row = first + token * stride
                _restore_keys(coded[at : at + size], num, keys, words, row, stride, into)
                at += size
            for token in range(tokens):
                row = first + token * stride + keys
                at += _restore_value(coded[at:], into[row : row + rest])
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
