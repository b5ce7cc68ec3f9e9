"""Rounded forms over memory: blocks in, streams out, and back.

The kernels are compiled when this module is imported (`rounding_kernels.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prfaas.core.codec.codecs import CodedSegment, Form, SegmentMode, read_head
from prfaas.pool.codec import rounding_kernels as kernels
from prfaas.pool.codec.kernels import Bytes

_ALIGNMENT = 8


def round_block(form: Form, data: memoryview, rounded: memoryview) -> bytearray:
    """Return the stream of a block.

    Args:
        data: Its bytes, contiguous.
        rounded: Writable, of the same size: gets the bytes that the stream decodes to.
    """
    head = form.head
    stream = bytearray(form.coded_bytes)
    stream[: len(head)] = head
    source, target = _aligned(data), np.frombuffer(stream, np.uint8)
    start, at = 0, len(head)
    for each in form.segments:
        end = start + each.repeats * each.decoded_each
        at += _encode(each, source[start:end], target[at:])
        start = end
    _restore(form, len(head), memoryview(stream), rounded)
    return stream


def restore_block(stream: memoryview, into: memoryview) -> Form:
    """Decode the stream of a block; `into` holds anything after an error; PeerError if it is none
    of exactly this block.

    Returns:
        The form that it had.
    """
    form, body = read_head(stream, len(into))
    _restore(form, body, stream, into)
    return form


def _restore(form: Form, body: int, stream: memoryview, into: memoryview) -> None:
    target = np.frombuffer(into, np.uint8)
    is_aligned = target.ctypes.data % _ALIGNMENT == 0
    source, start, at = np.frombuffer(stream, np.uint8), 0, body
    for each in form.segments:
        # Beside its place, a repeat at a time: a layer, and not the whole block.
        step = each.repeats if is_aligned else 1
        for _ in range(0, each.repeats, step):
            end = start + step * each.decoded_each
            place = target[start:end] if is_aligned else np.empty(end - start, np.uint8)
            at += _decode(each, source[at : at + step * each.coded_each], place)
            if not is_aligned:
                target[start:end] = place
            start = end


def _encode(segment: CodedSegment, source: Bytes, target: Bytes) -> int:
    first, heads, keys, values = segment.sizes
    match segment.mode:
        case SegmentMode.RAW:
            target[: source.size] = source
            return source.size
        case SegmentMode.FP8:
            return kernels.encode_fp8(source.view(np.uint16), first, target)
        case SegmentMode.STATE:
            return kernels.encode_state(source.view(np.uint32), target)
        case SegmentMode.KIVI4:
            words = source.view(np.uint16)
            by_token = segment.is_token_major
            return kernels.encode_kivi(words, first, heads, keys, values, by_token, target)


def _decode(segment: CodedSegment, source: Bytes, target: Bytes) -> int:
    first, heads, keys, values = segment.sizes
    match segment.mode:
        case SegmentMode.RAW:
            target[:] = source
            return source.size
        case SegmentMode.FP8:
            return kernels.decode_fp8(source, first, target.view(np.uint16))
        case SegmentMode.STATE:
            return kernels.decode_state(source, target.view(np.uint32))
        case SegmentMode.KIVI4:
            words = target.view(np.uint16)
            by_token = segment.is_token_major
            return kernels.decode_kivi(source, first, heads, keys, values, by_token, words)


def _aligned(data: memoryview) -> NDArray[Any]:
    found = np.frombuffer(data, np.uint8)
    return found if found.ctypes.data % _ALIGNMENT == 0 else found.copy()
