"""Limits on the difference of two versions of a block (`difference.py`), for readers of one."""

from __future__ import annotations

from collections.abc import Mapping

LIMITS: Mapping[str, float] = {"float32": 0.3, "float16": 0.3, "bfloat16": 0.3}
"""Largest difference of honest versions by type; measured in docs/results/verification.md."""
DIFFERENT = 1.0


def is_altered(found: Mapping[str, float], limits: Mapping[str, float] = LIMITS) -> bool:
    """Return True if a difference is above the limit of its type.

    Types without a limit, such as those of an fp8 cache, are no evidence: an honest version may
    round the last bit of a number otherwise, and by how much it then differs is not known.
    """
    return any(t in limits and not value <= limits[t] for t, value in found.items())
