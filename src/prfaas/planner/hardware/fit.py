"""Curves of measurements, and the profile file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from prfaas.planner.hardware.measure import MeasuredPoint, NoPrefixCacheError
from prfaas.planner.hardware.monotone import MonotoneCubic
from prfaas.planner.hardware.profiles import PrefillProfile
from prfaas.planner.model.kv_geometry import FloatArray

_COLD_MIN = 0.9  # of a cold prompt's time: a prompt that takes as long was not resumed


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Quality of a fit through the knots."""

    seconds: tuple[float, ...]
    """Medians, raised where they fell, s."""
    num_raised: int
    """Medians that had to be raised."""
    coefficients: tuple[float, float, float]
    """a, b, c >= 0 of T = a + b l + c l^2, s and tokens."""
    r_squared: float
    """Share of the variance that the quadratic explains."""
    quadratic_error_max: float
    """Largest relative error of the quadratic."""
    left_out_error_max: float | None
    """Largest relative error when a knot is predicted from the others; None with fewer than 4
    knots."""
    spread_max: float
    """Largest spread of repeats relative to their median."""

    def words(self) -> str:
        """One line for people."""
        a, b, c = self.coefficients
        left_out = (
            ""
            if self.left_out_error_max is None
            else f", knots predicted from their neighbours within {self.left_out_error_max:.1%}"
        )
        raised = f", {self.num_raised} falling medians raised" if self.num_raised else ""
        return (
            f"T = {a:.4g} + {b:.4g} l + {c:.4g} l^2 s: R^2 {self.r_squared:.5f}, within "
            f"{self.quadratic_error_max:.1%}{left_out}; repeats spread up to "
            f"{self.spread_max:.1%}{raised}"
        )


def fit_prefill(samples: list[MeasuredPoint]) -> PrefillFit:
    """Quality of measured knots.

    Args:
        samples: At least 2, lengths rising.
    """
    x = np.array([s.x for s in samples])
    medians = np.array([s.median for s in samples])
    y = np.maximum.accumulate(medians)
    a, b, c = _quadratic(x, y)
    fitted = a + b * x + c * x**2
    residual = float(np.sum((y - fitted) ** 2))
    variance = float(np.sum((y - y.mean()) ** 2))
    return PrefillFit(
        seconds=tuple(y.tolist()),
        num_raised=int(np.sum(y > medians)),
        coefficients=(a, b, c),
        r_squared=1 - residual / variance if variance else 1.0,
        quadratic_error_max=float(np.max(np.abs(fitted / y - 1))),
        left_out_error_max=_left_out(x, y) if len(samples) >= 4 else None,
        spread_max=max(s.spread for s in samples),
    )


def _quadratic(x: FloatArray, y: FloatArray) -> tuple[float, float, float]:
    """Coefficients with the smallest relative error, none negative."""
    scale = x.max()
    terms = np.stack([np.ones_like(x), x / scale, (x / scale) ** 2], axis=1)
    found, _ = nnls(terms / y[:, None], np.ones_like(y))
    return float(found[0]), float(found[1] / scale), float(found[2] / scale**2)


def _left_out(x: FloatArray, y: FloatArray) -> float:
    errors = []
    for i in range(1, len(x) - 1):
        keep = np.arange(len(x)) != i
        predicted = float(MonotoneCubic(x[keep], y[keep])(x[i]))
        errors.append(abs(predicted / float(y[i]) - 1))
    return max(errors)


@dataclass(frozen=True, slots=True)
class ResumedFit:
    """Times of resumed prefills beside their new tokens, R of `PrefillProfile`."""

    prefixes: tuple[int, ...] = ()
    """Cached tokens, rising; empty if none were measured."""
    seconds: tuple[float, ...] = ()
    """R at each, at least 0, s."""
    error_max: float = 0.0
    """Largest relative error of T(prefix, new) at a measured point."""

    def words(self) -> str:
        """A clause for people; "" if none were measured."""
        if not self.prefixes:
            return ""
        return f"; resumed prefills within {self.error_max:.1%}"


def fit_resumed(
    cold: PrefillFit,
    lengths: Sequence[float],
    rows: Sequence[Sequence[MeasuredPoint]],
    prefixes: Sequence[int],
    new_tokens: Sequence[int],
) -> ResumedFit:
    """R at each prefix: the median over the new lengths of what the cold curve leaves.

    Args:
        cold: Times of cold prompts.
        rows: Samples of resumed prefills as `measure_resumed` returns them.
        prefixes: Prefix of each row, tokens.
        new_tokens: New length of each column, tokens.

    Raises:
        NoPrefixCacheError: A resumed prefill takes as long as a cold one of the whole prompt.
    """
    if not rows:
        return ResumedFit()
    curve = PrefillProfile("measured", "", tuple(map(float, lengths)), cold.seconds)
    found, error_max = [], 0.0
    for row, prefix in zip(rows, prefixes, strict=True):
        whole = [prefix + new for new in new_tokens]
        for sample, total in zip(row, whole, strict=True):
            if sample.median >= _COLD_MIN * curve.seconds_at(total):
                raise NoPrefixCacheError(
                    f"{total - prefix} tokens after {prefix} that were sent before take "
                    f"{sample.median:.3g} s, a prompt of {total} takes "
                    f"{curve.seconds_at(total):.3g} s: the engine does not keep prefixes; enable "
                    "its prefix cache, or give --prefixes none"
                )
        pairs = list(zip(row, whole, strict=True))
        after = [curve.seconds_at(total) - curve.seconds_at(s.x) for s, total in pairs]
        rest = [s.median - more for (s, _), more in zip(pairs, after, strict=True)]
        found.append(max(float(np.median(rest)), 0.0))
        for (sample, total), more in zip(pairs, after, strict=True):
            fitted = max(found[-1] + more, curve.seconds_at(total - sample.x))
            error_max = max(error_max, abs(fitted / sample.median - 1))
    return ResumedFit(tuple(prefixes), tuple(found), error_max)


def profile_toml(
    source: str,
    samples: list[MeasuredPoint],
    fit: PrefillFit,
    resumed: ResumedFit,
    decode: list[list[MeasuredPoint]] | None,
    contexts: list[int],
) -> str:
    """A profile file.

    Args:
        source: Provenance in one line.
        resumed: Times after cached prefixes.
        decode: Decode samples, one row for each batch, or None.
        contexts: Context of each column of `decode`, tokens.
    """
    lines = [
        "[prefill]",
        f"source = {_quoted(source)}",
        f"lengths = [{', '.join(f'{s.x:.0f}' for s in samples)}]",
        f"seconds = [{', '.join(f'{y:.6g}' for y in fit.seconds)}]",
        f"fit = {_quoted(fit.words() + resumed.words())}",
    ]
    if resumed.prefixes:
        lines[-1:-1] = [
            f"prefixes = [{', '.join(map(str, resumed.prefixes))}]",
            f"resume_seconds = [{', '.join(f'{s:.6g}' for s in resumed.seconds)}]",
        ]
    if decode:
        spread = max(sample.spread for row in decode for sample in row)
        steps = [", ".join(f'"{s.median * 1e9:.0f}ns"' for s in row) for row in decode]
        lines += [
            "",
            "[decode]",
            f"source = {_quoted(source)}",
            f"batches = [{', '.join(f'{row[0].x:.0f}' for row in decode)}]",
            f"contexts = [{', '.join(map(str, contexts))}]",
            "step = [" + ", ".join(f"[{row}]" for row in steps) + "]",
            f"fit = {_quoted(f'medians of gaps between tokens; gaps spread up to {spread:.1%}')}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
