"""Difference of two versions of a block: that which was received, and one computed here.

Engines compute the same block with other batches, chunks and kernels, so honest versions differ. In
a mixture of experts rounding sends a token to another expert now and then, and its numbers differ
by much more than rounding does. The difference of a plane is the larger one of

- the Euclidean norm of what differs, divided by the norm of what was computed here;
- a SHARE of the same of its worst run of RUN numbers, so that a part that is replaced does not
  vanish in a large block. The norm of a run counts as at least FLOOR of that of an average one.

A number that is not finite in one version only, or bytes of a type that is not a floating-point
number, make a difference of 1 unless they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from prfaas.core.kv.blocks import Planes
from prfaas.core.kv.difference_limits import DIFFERENT

Floats = npt.NDArray[np.float64]
RUN = 1024
"""Numbers that are compared together."""
FLOOR = 0.1
SHARE = 0.5
"""Of the difference of a run: one of zeros is 0.5."""
WIDTHS: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of the numbers of types that can be compared."""
SLAB = 64 * RUN
"""Numbers that are compared at a time: 2 MB of memory for a plane of any size."""


def differences(received: memoryview, computed: memoryview, planes: Planes) -> dict[str, float]:
    """Largest difference of the planes of a block, by type.

    Args:
        received: A block from another cluster.
        computed: The same block, computed here.
        planes: Its dtype planes; without, bytes are compared.
    """
    if len(received) != len(computed) or sum(p.num_bytes for p in planes) != len(received):
        return {"bytes": 0.0 if received == computed else DIFFERENT}
    found: dict[str, float] = {}
    start = 0
    for dtype, num_bytes in planes:
        end = start + num_bytes
        with np.errstate(all="ignore"):  # Bytes of a peer may be any numbers.
            difference = _of_plane(received[start:end], computed[start:end], dtype)
        found[dtype] = max(found.get(dtype, 0.0), difference)
        start = end
    return found


def _of_plane(received: memoryview, computed: memoryview, dtype: str) -> float:
    if received == computed:
        return 0.0
    width = WIDTHS.get(dtype)
    if width is None or len(received) % width:
        return DIFFERENT
    distances, norms = [], []
    for start in range(0, len(received), SLAB * width):
        end = start + SLAB * width
        a, b = _numbers(received[start:end], dtype), _numbers(computed[start:end], dtype)
        is_finite = np.isfinite(b)
        if not np.array_equal(np.isfinite(a), is_finite):
            return DIFFERENT
        a[~is_finite] = b[~is_finite] = 0.0
        norms.append(_norms(b))
        distances.append(_norms(np.subtract(a, b, out=a)))
    return _difference(np.concatenate(distances), np.concatenate(norms))


def _difference(distances: Floats, norms: Floats) -> float:
    """Difference of a plane, from those of its runs."""
    whole = float(np.linalg.norm(norms))
    if not whole:
        return DIFFERENT if distances.any() else 0.0
    floor = FLOOR * whole / len(norms) ** 0.5
    worst = float(np.max(distances / np.maximum(norms, floor)))
    return max(float(np.linalg.norm(distances)) / whole, SHARE * worst)


def _norms(values: Floats) -> Floats:
    """Norm of each run; the last one may be shorter."""
    whole = len(values) // RUN * RUN
    norms: Floats = np.linalg.norm(values[:whole].reshape(-1, RUN), axis=1)
    return norms if whole == len(values) else np.append(norms, np.linalg.norm(values[whole:]))


def _numbers(data: memoryview, dtype: str) -> Floats:
    """Numbers of a part of a plane, in new memory."""
    if dtype == "bfloat16":
        words = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return words.view(np.float32).astype(np.float64)
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).astype(np.float64)
