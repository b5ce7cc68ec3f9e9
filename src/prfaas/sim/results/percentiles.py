"""Statistics of a set of values, under the names that AIPerf gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prfaas.planner.model.kv_geometry import FloatArray

PERCENTILES = (50, 75, 90, 95, 99)


def spread(values: Sequence[float] | FloatArray | NDArray[np.int64]) -> dict[str, float]:
    """avg, min, max, std (of the population) and percentiles, linear between values.

    Returns:
        Empty without values.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.size == 0:
        return {}
    percentiles = np.percentile(found, PERCENTILES)
    return {
        "avg": float(found.mean()),
        "min": float(found.min()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, percentiles, strict=True)},
        "max": float(found.max()),
        "std": float(found.std()),
    }
