"""Compiled kernels of the exponent window. Imported once numba is wanted: that takes a second or
more.

A coded stream is a row of chunks, each of a header and a body; integers are little-endian:

    kind u8 | base u8 | decoded bytes u16 | escapes u16

A raw chunk (kind 0, base 0, no escapes) has its bytes as body. A window chunk (kind 1) has an even
number of values `v`, in a first and a second half, and three parts as body: a byte with sign and
mantissa of every value; a byte with the codes of a value of the first half (low 4 bits) and of the
second; a byte for every code 15. A code is `base - exponent` modulo 256; 15 says that the exponent
is the next of the bytes at the end, in the order of the codes' bytes, low bits first. `base` is the
largest exponent of the chunk, infinities and NaNs left out.

Loops run over slices from 0 on, and arithmetic stays in 8 and 16 bits: that is what LLVM needs to
use vector instructions. Everything here releases the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

HEADER_BYTES = 6
CHUNK_VALUES = 8192
"""A chunk and its code stay in a core's first two caches."""
RAW_CHUNK_BYTES = 32768
SCAN = 64
"""Codes that are looked at together for escapes."""
MALFORMED = -1

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint16]
_u8, _u16 = np.uint8, np.uint16
_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_READ8 = types.Array(types.uint8, 1, "C", readonly=True)
_READ16 = types.Array(types.uint16, 1, "C", readonly=True)
_WRITE8, _WRITE16 = types.uint8[::1], types.uint16[::1]


def _compiled(signature: Any) -> Callable[[_Kernel], _Kernel]:
    """Compile at import; keep the code on disk where there is a folder for it."""

    def compiled(kernel: _Kernel) -> _Kernel:
        try:
            made: _Kernel = njit(signature, nogil=True, cache=True)(kernel)
        except (RuntimeError, OSError):  # Neither beside the source nor in the home folder.
            made = njit(signature, nogil=True)(kernel)
        return made

    return compiled


def _inner(kernel: _Kernel) -> _Kernel:
    made: _Kernel = njit(nogil=True)(kernel)
    return made


@_inner
def _base(values: Words) -> np.uint8:
    top = _u16(0)
    for i in range(values.size):
        exponent = _u16(_u16(values[i] << _u16(1)) >> _u16(8))
        exponent = exponent if exponent != _u16(255) else _u16(0)
        top = max(top, exponent)
    return _u8(top)


@_inner
def _pack(
    first: Words, second: Words, base: np.uint8, rest1: Bytes, rest2: Bytes, codes: Bytes
) -> None:
    for i in range(codes.size):
        x, y = first[i], second[i]
        rest1[i] = _u8(_u8(_u8(x >> _u16(8)) & _u8(128)) | _u8(_u8(x) & _u8(127)))
        rest2[i] = _u8(_u8(_u8(y >> _u16(8)) & _u8(128)) | _u8(_u8(y) & _u8(127)))
        low = min(_u8(base - _u8(x >> _u16(7))), _u8(15))
        high = min(_u8(base - _u8(y >> _u16(7))), _u8(15))
        codes[i] = _u8(low | _u8(high << _u8(4)))


@_inner
def _has_escape(codes: Bytes) -> np.uint8:
    found = _u8(0)
    for i in range(codes.size):
        code = codes[i]
        is_low, is_high = _u8(code & _u8(15)) == _u8(15), _u8(code >> _u8(4)) == _u8(15)
        found |= _u8(_u8(is_low) | _u8(is_high))
    return found


@_inner
def _escapes(codes: Bytes, first: Words, second: Words, into: Bytes) -> int:
    """Write the exponents of codes 15; return how many, MALFORMED if `into` is too short."""
    count = 0
    for at in range(0, codes.size, SCAN):
        some = codes[at : at + SCAN]
        if not _has_escape(some):
            continue
        for i in range(some.size):
            code = some[i]
            if count + 2 > into.size:
                return MALFORMED
            if _u8(code & _u8(15)) == _u8(15):
                into[count] = _u8(first[at + i] >> _u16(7))
                count += 1
            if _u8(code >> _u8(4)) == _u8(15):
                into[count] = _u8(second[at + i] >> _u16(7))
                count += 1
    return count


@_inner
def _header(into: Bytes, kind: int, base: np.uint8, num_bytes: int, num_escapes: int) -> None:
    into[0], into[1] = _u8(kind), base
    into[2], into[3] = _u8(num_bytes & 255), _u8(num_bytes >> 8)
    into[4], into[5] = _u8(num_escapes & 255), _u8(num_escapes >> 8)


@_compiled(types.int64(_READ16, _READ8, _WRITE8))
def encode_window(values: Words, data: Bytes, into: Bytes) -> int:
    """Code 16-bit values; chunks that do not shrink stay raw; returns bytes written.

    Args:
        values: An even number of them, at least 2.
        data: The same memory as bytes.
        into: As large as `coded_bytes_max` of the bytes.
    """
    at = 0
    for start in range(0, values.size, CHUNK_VALUES):
        part = values[start : start + CHUNK_VALUES]
        half = part.size // 2
        first, second = part[:half], part[half:]
        base = _base(part)
        body = at + HEADER_BYTES
        codes = into[body + part.size : body + part.size + half]
        _pack(
            first,
            second,
            base,
            into[body : body + half],
            into[body + half : body + part.size],
            codes,
        )
        escapes = into[body + part.size + half : body + 2 * part.size]
        count = _escapes(codes, first, second, escapes)
        if count == MALFORMED:
            size = 2 * part.size
            into[body : body + size] = data[2 * start : 2 * start + size]
            _header(into[at:body], 0, _u8(0), size, 0)
            at = body + size
        else:
            _header(into[at:body], 1, base, 2 * part.size, count)
            at = body + part.size + half + count
    return at


@_inner
def _unpack(
    rest1: Bytes, rest2: Bytes, codes: Bytes, base: np.uint8, first: Words, second: Words
) -> None:
    for i in range(codes.size):
        code, x, y = codes[i], _u16(rest1[i]), _u16(rest2[i])
        low = _u16(_u8(base - _u8(code & _u8(15))))
        high = _u16(_u8(base - _u8(code >> _u8(4))))
        first[i] = _u16(
            _u16(_u16(x & _u16(128)) << _u16(8)) | _u16(low << _u16(7)) | _u16(x & _u16(127))
        )
        second[i] = _u16(
            _u16(_u16(y & _u16(128)) << _u16(8)) | _u16(high << _u16(7)) | _u16(y & _u16(127))
        )


@_inner
def _restore(codes: Bytes, escapes: Bytes, first: Words, second: Words) -> int:
    """Put the exponents of codes 15 in; return how many, MALFORMED if there are fewer."""
    count = 0
    for at in range(0, codes.size, SCAN):
        some = codes[at : at + SCAN]
        if not _has_escape(some):
            continue
        for i in range(some.size):
            code = some[i]
            if _u8(code & _u8(15)) == _u8(15):
                if count >= escapes.size:
                    return MALFORMED
                exponent = _u16(_u16(escapes[count]) << _u16(7))
                first[at + i] = _u16(_u16(first[at + i] & _u16(0x807F)) | exponent)
                count += 1
            if _u8(code >> _u8(4)) == _u8(15):
                if count >= escapes.size:
                    return MALFORMED
                exponent = _u16(_u16(escapes[count]) << _u16(7))
                second[at + i] = _u16(_u16(second[at + i] & _u16(0x807F)) | exponent)
                count += 1
    return count


@_compiled(types.int64(_READ8, _WRITE8, _WRITE16))
def decode_window(coded: Bytes, into: Bytes, words: Words) -> int:
    """Decode a stream of chunks. Nothing is read or written beyond the arguments, whatever they
    hold.

    Args:
        into: Where the bytes go.
        words: The same memory as 16-bit values; a byte at the end that is odd is left out.

    Returns:
        Bytes written, MALFORMED if the stream is none or holds more than `into`.
    """
    pos, at = 0, 0
    while pos < coded.size:
        body = pos + HEADER_BYTES
        if body > coded.size:
            return MALFORMED
        kind, base = coded[pos], coded[pos + 1]
        size = int(coded[pos + 2]) + 256 * int(coded[pos + 3])
        count = int(coded[pos + 4]) + 256 * int(coded[pos + 5])
        if size == 0 or at + size > into.size:
            return MALFORMED
        if kind == 0:
            if base or count or body + size > coded.size:
                return MALFORMED
            into[at : at + size] = coded[body : body + size]
            pos, at = body + size, at + size
            continue
        num, half = size // 2, size // 4
        end = body + num + half + count
        if kind != 1 or size % 4 or at % 2 or end > coded.size:
            return MALFORMED
        first = words[at // 2 : at // 2 + half]
        second = words[at // 2 + half : at // 2 + num]
        codes = coded[body + num : body + num + half]
        _unpack(
            coded[body : body + half], coded[body + half : body + num], codes, base, first, second
        )
        if _restore(codes, coded[body + num + half : end], first, second) != count:
            return MALFORMED
        pos, at = end, at + size
    return at
