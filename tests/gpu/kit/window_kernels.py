"""The exponent window in Triton: the same stream as `prfaas/pool/codec/kernels.py` makes.

Chunks are coded into slots of equal size, and then moved together; a decoder is given the places of
the chunks, which one walk over the headers finds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from prfaas.pool.codec.kernels import CHUNK_VALUES, HEADER_BYTES, SCAN

HALF = CHUNK_VALUES // 2
SLOT_BYTES = HEADER_BYTES + 2 * CHUNK_VALUES


@triton.jit
def _exponent(values):
    return (values >> 7) & 255


@triton.jit
def _encode_kernel(
    values, out, sizes, num_values, half_max: tl.constexpr, header: tl.constexpr, scan: tl.constexpr
):
    """Code the chunk of a program into its slot, and write how many bytes it has."""
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * 2 * half_max
    num = tl.minimum(num_values - start, 2 * half_max).to(tl.int32)
    half = num // 2
    at = tl.arange(0, half_max)
    inside = at < half
    x = tl.load(values + start + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    y = tl.load(values + start + half + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
    ex, ey = _exponent(x), _exponent(y)
    base = tl.max(tl.maximum(tl.where(ex == 255, 0, ex), tl.where(ey == 255, 0, ey)), axis=0)
    low = tl.minimum((base - ex) & 255, 15)
    high = tl.minimum((base - ey) & 255, 15)
    escapes_x = tl.where(inside & (low == 15), 1, 0)
    escapes_y = tl.where(inside & (high == 15), 1, 0)
    both = escapes_x + escapes_y
    before = tl.cumsum(both, axis=0) - both
    total = tl.sum(both, axis=0)
    # The writer of the stream looks at codes in groups, and gives up where two more might not fit.
    grouped = tl.reshape(both, (half_max // scan, scan))
    has_escape = tl.broadcast_to(tl.sum(grouped, axis=1)[:, None], (half_max // scan, scan))
    looked_at = (tl.reshape(has_escape, (half_max,)) > 0) & inside
    is_raw = tl.max(tl.where(looked_at & (before + 2 > half), 1, 0), axis=0)
    slot = out + chunk * (header + 4 * half_max)
    body = slot + header
    how = tl.where(inside, is_raw, 2)
    raw, coded = how == 1, how == 0
    escaped_x, escaped_y = (how == 0) & (escapes_x == 1), (how == 0) & (escapes_y == 1)
    tl.store(body + at, ((x >> 8) & 128 | x & 127).to(tl.uint8), mask=coded)
    tl.store(body + half + at, ((y >> 8) & 128 | y & 127).to(tl.uint8), mask=coded)
    tl.store(body + num + at, (low | (high << 4)).to(tl.uint8), mask=coded)
    ends = body + num + half
    tl.store(ends + before, ex.to(tl.uint8), mask=escaped_x)
    tl.store(ends + before + escapes_x, ey.to(tl.uint8), mask=escaped_y)
    tl.store(body + 2 * at, (x & 255).to(tl.uint8), mask=raw)
    tl.store(body + 2 * at + 1, (x >> 8).to(tl.uint8), mask=raw)
    tl.store(body + 2 * (half + at), (y & 255).to(tl.uint8), mask=raw)
    tl.store(body + 2 * (half + at) + 1, (y >> 8).to(tl.uint8), mask=raw)
    kept = tl.where(is_raw == 1, 0, total)
    tl.store(slot, (1 - is_raw).to(tl.uint8))
    tl.store(slot + 1, tl.where(is_raw == 1, 0, base).to(tl.uint8))
    tl.store(slot + 2, ((2 * num) & 255).to(tl.uint8))
    tl.store(slot + 3, ((2 * num) >> 8).to(tl.uint8))
    tl.store(slot + 4, (kept & 255).to(tl.uint8))
    tl.store(slot + 5, (kept >> 8).to(tl.uint8))
    tl.store(sizes + chunk, header + tl.where(is_raw == 1, 2 * num, num + half + total))


@triton.jit
def _gather_kernel(slots, starts, sizes, out, slot_bytes: tl.constexpr, step: tl.constexpr):
    """Move a chunk from its slot to its place."""
    chunk = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + chunk)
    target = out + tl.load(starts + chunk)
    at = tl.arange(0, step)
    for first in range(0, size, step):
        mask = first + at < size
        tl.store(
            target + first + at,
            tl.load(slots + chunk * slot_bytes + first + at, mask=mask),
            mask=mask,
        )


@triton.jit
def _decode_kernel(coded, starts, places, values, half_max: tl.constexpr, header: tl.constexpr):
    """Decode the chunk of a program."""
    chunk = tl.program_id(0)
    slot = coded + tl.load(starts + chunk)
    target = values + tl.load(places + chunk)
    kind, base = tl.load(slot).to(tl.int32), tl.load(slot + 1).to(tl.int32)
    num = (tl.load(slot + 2).to(tl.int32) + 256 * tl.load(slot + 3).to(tl.int32)) // 2
    half, body = num // 2, slot + header
    at = tl.arange(0, half_max)
    inside = at < half
    how = tl.where(inside, kind, 2)
    window, raw = how == 1, how == 0
    x = tl.load(body + at, mask=window, other=0).to(tl.int32)
    y = tl.load(body + half + at, mask=window, other=0).to(tl.int32)
    codes = tl.load(body + num + at, mask=window, other=0).to(tl.int32)
    low, high = codes & 15, codes >> 4
    escapes_x = tl.where(window & (low == 15), 1, 0)
    escapes_y = tl.where(window & (high == 15), 1, 0)
    both = escapes_x + escapes_y
    before = tl.cumsum(both, axis=0) - both
    ends = body + num + half
    ex = tl.load(ends + before, mask=escapes_x == 1, other=0).to(tl.int32)
    ey = tl.load(ends + before + escapes_x, mask=escapes_y == 1, other=0).to(tl.int32)
    ex = tl.where(escapes_x == 1, ex, (base - low) & 255)
    ey = tl.where(escapes_y == 1, ey, (base - high) & 255)
    x = (x & 128) << 8 | ex << 7 | x & 127
    y = (y & 128) << 8 | ey << 7 | y & 127
    raw_x = tl.load(body + 2 * at, mask=raw, other=0).to(tl.int32)
    raw_x |= tl.load(body + 2 * at + 1, mask=raw, other=0).to(tl.int32) << 8
    raw_y = tl.load(body + 2 * (half + at), mask=raw, other=0).to(tl.int32)
    raw_y |= tl.load(body + 2 * (half + at) + 1, mask=raw, other=0).to(tl.int32) << 8
    tl.store(target + at, tl.where(kind == 1, x, raw_x).to(tl.int16), mask=inside)
    tl.store(target + half + at, tl.where(kind == 1, y, raw_y).to(tl.int16), mask=inside)


def start_encoding(values: torch.Tensor, slots: torch.Tensor, sizes: torch.Tensor) -> None:
    """Code chunks into slots, of `SLOT_BYTES` each."""
    _encode_kernel[(sizes.numel(),)](
        values,
        slots,
        sizes,
        values.numel(),
        half_max=HALF,
        header=HEADER_BYTES,
        scan=SCAN,
        num_warps=8,
    )


def start_gathering(
    slots: torch.Tensor, starts: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor
) -> None:
    """Move chunks from their slots to their places."""
    _gather_kernel[(sizes.numel(),)](slots, starts, sizes, out, slot_bytes=SLOT_BYTES, step=4096)


def start_decoding(
    coded: torch.Tensor, starts: torch.Tensor, places: torch.Tensor, values: torch.Tensor
) -> None:
    """Decode chunks to their places among the values."""
    _decode_kernel[(starts.numel(),)](
        coded, starts, places, values, half_max=HALF, header=HEADER_BYTES, num_warps=8
    )


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code 16-bit values on their device.

    Args:
        values: Contiguous int16, an even number of them.

    Returns:
        The stream, uint8, and the place of each chunk in it, int64.
    """
    num_chunks = -(-values.numel() // CHUNK_VALUES)
    slots = torch.empty(num_chunks * SLOT_BYTES, dtype=torch.uint8, device=values.device)
    sizes = torch.empty(num_chunks, dtype=torch.int64, device=values.device)
    start_encoding(values, slots, sizes)
    ends = torch.cumsum(sizes, 0)
    starts = ends - sizes
    out = torch.empty(int(ends[-1]), dtype=torch.uint8, device=values.device)
    start_gathering(slots, starts, sizes, out)
    return out, starts


def decode(coded: torch.Tensor, starts: torch.Tensor, num_values: int) -> torch.Tensor:
    """Decode a stream on its device.

    Args:
        coded: The stream, uint8.
        starts: Place of each chunk.
        num_values: Of the whole stream.
    """
    values = torch.empty(num_values, dtype=torch.int16, device=coded.device)
    places = torch.arange(starts.numel(), device=coded.device) * CHUNK_VALUES
    start_decoding(coded, starts, places, values)
    return values


def chunk_starts(coded: Any) -> list[int]:
    """Return the places of the chunks of a stream, from its headers."""
    data, at, found = np.asarray(coded), 0, list[int]()
    while at < data.size:
        found.append(at)
        size = int(data[at + 2]) + 256 * int(data[at + 3])
        body = size if data[at] == 0 else size // 2 + size // 4
        at += HEADER_BYTES + body + int(data[at + 4]) + 256 * int(data[at + 5])
    return found
