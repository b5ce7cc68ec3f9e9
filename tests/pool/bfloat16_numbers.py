"""Normal numbers in bfloat16, for tests of codecs."""

import numpy as np


def normal(num_values: int, scale: float = 1.0, seed: int = 0) -> bytes:
    """Return normal numbers in bfloat16."""
    values = np.random.default_rng(seed).standard_normal(num_values) * scale
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
