"""Monotone cubic interpolation. A gateway reads plans, and has no scipy for it."""

from __future__ import annotations

import numpy as np

from prfaas.planner.model.kv_geometry import FloatArray


class MonotoneCubic:
    """Cubics through knots that rise and fall only where the knots do (PCHIP).

    Args:
        x: Rising, at least 2.
        y: As many.

    References:
        F. N. Fritsch, J. Butland, "A method for constructing local monotone piecewise cubic
        interpolants", SIAM J. Sci. Stat. Comput. 5 (1984).
    """

    def __init__(self, x: FloatArray, y: FloatArray) -> None:
        width = np.diff(x)
        secant = np.diff(y) / width
        slope = _slopes(width, secant)
        bend = (slope[:-1] + slope[1:] - 2 * secant) / width
        self._x = x
        self._terms = y[:-1], slope[:-1], (secant - slope[:-1]) / width - bend, bend / width

    def __call__(self, x: FloatArray) -> FloatArray:
        """Values at `x`, any shape, within the knots."""
        piece = np.clip(np.searchsorted(self._x, x, side="right") - 1, 0, len(self._x) - 2)
        step = x - self._x[piece]
        value, slope, square, cube = (term[piece] for term in self._terms)
        # The order of the sum is scipy's, whose results are the same to the bit.
        return np.asarray(
            value + slope * step + square * (step * step) + cube * (step * step * step),
            dtype=np.float64,
        )


def _slopes(width: FloatArray, secant: FloatArray) -> FloatArray:
    """Slope at each knot: a weighted harmonic mean of its secants, 0 at a turning point."""
    if len(secant) == 1:
        return np.repeat(secant, 2)
    left, right = secant[:-1], secant[1:]
    weights = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    rises = left * right > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = 1 / ((weights[0] / left + weights[1] / right) / (weights[0] + weights[1]))
    first = _end(width[0], width[1], secant[0], secant[1])
    last = _end(width[-1], width[-2], secant[-1], secant[-2])
    return np.concatenate(([first], np.where(rises, mean, 0.0), [last]))


def _end(width: float, next_width: float, secant: float, next_secant: float) -> float:
    """Slope at an end, of the parabola through three knots, limited so that it turns nowhere."""
    slope = ((2 * width + next_width) * secant - width * next_secant) / (width + next_width)
    if slope * secant <= 0:
        return 0.0
    if secant * next_secant <= 0 and abs(slope) > 3 * abs(secant):
        return 3 * secant
    return float(slope)
