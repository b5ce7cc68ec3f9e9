"""The exponent window over memory: fragments in, coded streams out, and back.

The kernels are compiled when this module is imported (`kernels.py`).
"""

from __future__ import annotations

import numpy as np

from prfaas.core.codec.codecs import CODABLE, EXPONENT_WINDOW, RATIO_MIN
from prfaas.core.kv.blocks import Planes
from prfaas.errors import PeerError
from prfaas.pool.codec import kernels
from prfaas.pool.codec.kernels import HEADER_BYTES, RAW_CHUNK_BYTES, Bytes

_PAIR = 4
"""Bytes of two values, the least that is coded."""


def coded_bytes_max(num_bytes: int) -> int:
    """Return the room that coding takes at most, whatever the bytes and planes."""
    return 2 * num_bytes + 4 * kernels.CHUNK_VALUES


def encode(data: memoryview, planes: Planes, scratch: memoryview) -> memoryview | None:
    """Code a part of a block.

    Args:
        data: Its bytes, contiguous.
        planes: Its dtype planes; as many bytes as `data`.
        scratch: Writable, as large as `coded_bytes_max`.

    Returns:
        The coded stream, in `scratch`; None if it would not be worth it.
    """
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(scratch, np.uint8)
    at = start = 0
    for dtype, num_bytes in planes:
        end = start + num_bytes
        is_coded = CODABLE.get(dtype) == EXPONENT_WINDOW
        even = _codable_bytes(source, start, num_bytes) if is_coded else 0
        if even:
            values = source[start : start + even]
            at += kernels.encode_window(values.view(np.uint16), values, target[at:])
        at = _keep(source[start + even : end], target, at)
        start = end
        if at * RATIO_MIN > len(data):
            return None
    return scratch[:at] if at else None


def decode(coded: memoryview, into: memoryview) -> None:
    """Restore a part of a block; `into` holds anything after an error.

    Raises:
        PeerError: The stream is malformed, or its bytes are not as many as `into` has.
    """
    target = np.frombuffer(into, np.uint8)
    words = target[: len(into) // 2 * 2].view(np.uint16)
    if not words.flags.aligned:
        raise PeerError("a coded fragment starts at an odd byte of its block")
    count = kernels.decode_window(np.frombuffer(coded, np.uint8), target, words)
    if count != len(into):
        raise PeerError(
            f"a coded fragment of {len(coded)} bytes does not decode to its {len(into)} bytes"
        )


def _codable_bytes(source: Bytes, start: int, num_bytes: int) -> int:
    """Whole pairs of values from `start` on; none where a value would lie at an odd address."""
    even = num_bytes // _PAIR * _PAIR
    return even if source[start : start + even].view(np.uint16).flags.aligned else 0


def _keep(rest: Bytes, target: Bytes, at: int) -> int:
    """Append bytes as raw chunks; return where they end."""
    for start in range(0, rest.size, RAW_CHUNK_BYTES):
        some = rest[start : start + RAW_CHUNK_BYTES]
        header = bytes((0, 0, some.size & 255, some.size >> 8, 0, 0))
        target[at : at + HEADER_BYTES] = np.frombuffer(header, np.uint8)
        target[at + HEADER_BYTES : at + HEADER_BYTES + some.size] = some
        at += HEADER_BYTES + some.size
    return at
