"""Prefill and decode times of an instance, and tables of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from prfaas.core.routing.predictions import RESUME_SHIFT, Costs
from prfaas.errors import ConfigError
from prfaas.planner.hardware.monotone import MonotoneCubic
from prfaas.planner.model.kv_geometry import FloatArray, KvGeometry, kv_bytes_at
from prfaas.units import NS_PER_S


@dataclass(frozen=True)
class PrefillProfile:
    """T_prefill(prefix, new) of one instance; ConfigError if the knots do not rise.

    Cold prompts are measured knots, joined by monotone cubics (PCHIP). What new tokens cost after a
    cached prefix follows from the same curve, whose slope at a length has the attention of a token
    over all before it:

        T(prefix, new) = max(T(new), T(prefix + new) - T(prefix) + R(prefix))

    R is the time of a resumed prefill beside its tokens: the fixed time of a cold one, and what was
    measured beyond (loading the prefix, expanding its latents)."""

    name: str
    source: str
    """Origin of the knots."""
    lengths: tuple[float, ...]
    """Prompt lengths of the knots, tokens, rising, at least 2."""
    seconds: tuple[float, ...]
    """Prefill time at each knot, s, never falling."""
    extrapolate: bool = False
    """Extend the end segments outside the knots. Without it, a workload outside the range is an
    error."""
    prefixes: tuple[float, ...] = ()
    """Cached prefixes at which R was measured, tokens, rising; may be empty."""
    resume_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._check_prefixes()
        if len(self.lengths) != len(self.seconds) or len(self.lengths) < 2:
            raise ConfigError(
                f"profile {self.name!r} has {len(self.lengths)} lengths and {len(self.seconds)} "
                "times; it needs as many of one as of the other, and at least 2"
            )
        if self.lengths[0] <= 0 or self.seconds[0] <= 0:
            raise ConfigError(f"profile {self.name!r}: lengths and times have to be above 0")
        if any(np.diff(self.lengths) <= 0):
            raise ConfigError(f"profile {self.name!r}: lengths {self.lengths} do not rise")
        fall = np.flatnonzero(np.diff(self.seconds) < 0)
        if fall.size:
            at = int(fall[0]) + 1
            raise ConfigError(
                f"profile {self.name!r}: {self.seconds[at]} s at {self.lengths[at]:.0f} tokens is "
                f"less than {self.seconds[at - 1]} s at {self.lengths[at - 1]:.0f}; measure that "
                "knot again or leave it out"
            )

    def _check_prefixes(self) -> None:
        if len(self.prefixes) != len(self.resume_seconds):
            raise ConfigError(
                f"profile {self.name!r} has {len(self.prefixes)} prefixes and "
                f"{len(self.resume_seconds)} resume_seconds; it needs as many of one as of the "
                "other"
            )
        if any(np.diff((0, *self.prefixes)) <= 0):
            raise ConfigError(
                f"profile {self.name!r}: prefixes {self.prefixes} have to be above 0 and rise"
            )
        if any(s < 0 for s in self.resume_seconds):
            raise ConfigError(
                f"profile {self.name!r}: resume_seconds {self.resume_seconds} have to be 0 or more"
            )

    @cached_property
    def _curve(self) -> MonotoneCubic:
        return MonotoneCubic(np.array(self.lengths), np.array(self.seconds))

    @property
    def fixed_s(self) -> float:
        """Time of a cold prefill that does not depend on its length, s: the head of the curve."""
        (x0, x1, *_), (y0, y1, *_) = self.lengths, self.seconds
        return max(y0 - x0 * (y1 - y0) / (x1 - x0), 0.0)

    def resume_at(self, prefix: FloatArray) -> FloatArray:
        """R at each prefix, s: linear between measured ones, and on as they end."""
        if not self.prefixes:
            return np.full_like(prefix, self.fixed_s, dtype=np.float64)
        x, y = np.array((0.0, *self.prefixes)), np.array((self.fixed_s, *self.resume_seconds))
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0)
        beyond = np.maximum(prefix - x[-1], 0.0) * slope
        return np.asarray(np.interp(prefix, x, y) + beyond, dtype=np.float64)

    def after(self, prefix: FloatArray, num_new_tokens: FloatArray) -> FloatArray:
        """Prefill time of new tokens after a cached prefix, s: T(prefix, new).

        Args:
            prefix: Cached tokens, 0 or more, of the shape of the other.
            num_new_tokens: Tokens to compute, any shape.
        """
        cold = self.at(num_new_tokens)
        if not np.any(prefix):
            return cold
        end = np.asarray(prefix + num_new_tokens, dtype=np.float64)
        warm = self.at(end) - self.at(prefix) + self.resume_at(prefix)
        return np.asarray(np.where(prefix > 0, np.maximum(cold, warm), cold), dtype=np.float64)

    def at(self, num_tokens: FloatArray) -> FloatArray:
        """Time of a cold prefill at each length, s.

        Args:
            num_tokens: Tokens, any shape; the end segments are extended outside the knots.
        """
        x, y = np.array(self.lengths), np.array(self.seconds)
        inside = self._curve(np.clip(num_tokens, x[0], x[-1]))
        head, tail = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
        before = np.minimum(num_tokens - x[0], 0.0) * head
        after = np.maximum(num_tokens - x[-1], 0.0) * tail
        # No prompt is faster than a hundredth of the shortest one measured.
        return np.asarray(np.maximum(inside + before + after, y[0] / 100), dtype=np.float64)

    def seconds_at(self, num_tokens: float) -> float:
        """Time of a cold prefill of one length, s."""
        return float(self.at(np.array([float(num_tokens)]))[0])

    def covers(self, low: float, high: float) -> bool:
        """Return True if the knots span [low, high]."""
        return self.lengths[0] <= low and high <= self.lengths[-1]

    def require(self, low: float, high: float) -> None:
        """Refuse lengths outside the knots unless extrapolation was asked for; ConfigError if [low,
        high] leaves the knots and `extrapolate` is off."""
        if not self.extrapolate and not self.covers(low, high):
            raise ConfigError(
                f"profile {self.name!r} covers {self.lengths[0]:.0f} to {self.lengths[-1]:.0f} "
                f"tokens, the workload's lengths go from {low:.0f} to {high:.0f}; measure the "
                "missing lengths, narrow the workload, or set extrapolate = true in the profile"
            )

    def scaled(self, factor: float) -> PrefillProfile:
        """The same times, `factor` times as slow."""
        return replace(
            self,
            seconds=tuple(s * factor for s in self.seconds),
            resume_seconds=tuple(s * factor for s in self.resume_seconds),
        )


@dataclass(frozen=True)
class DecodeProfile:
    """Decode step time of one instance by batch and context."""

    name: str
    source: str
    """Origin of the numbers."""
    batches: tuple[int, ...]
    """Batch sizes, rising, at least 1."""
    contexts: tuple[float, ...]
    """Context lengths, tokens, rising, at least 1."""
    step_seconds: tuple[tuple[float, ...], ...]
    """`step_seconds[i][j]` is the step time at `batches[i]`, `contexts[j]`, s."""

    def __post_init__(self) -> None:
        table = self.step_seconds
        if len(table) != len(self.batches) or any(len(r) != len(self.contexts) for r in table):
            raise ConfigError(
                f"decode profile {self.name!r}: the table of step times has to have one row for "
                f"each of {len(self.batches)} batches and one column for each of "
                f"{len(self.contexts)} contexts"
            )
        if any(step <= 0 for row in table for step in row):
            raise ConfigError(f"decode profile {self.name!r}: step times have to be above 0")
        if any(np.diff(self.batches) <= 0) or any(np.diff(self.contexts) <= 0):
            raise ConfigError(f"decode profile {self.name!r}: batches and contexts have to rise")

    def step_at(self, context: float) -> FloatArray:
        """Step time at each of `batches` for one context, s; constant outside the contexts."""
        rows = [np.interp(context, self.contexts, row) for row in self.step_seconds]
        return np.array(rows, dtype=np.float64)

    def step_of(self, batch: float, context: float) -> float:
        """Step time of a batch at one context, s; constant outside the batches."""
        return float(np.interp(batch, self.batches, self.step_at(context)))

    def largest_batch(self, context: float, step_max_s: float | None) -> tuple[float, float]:
        """Largest batch whose step is not longer than `step_max_s`, and its step time.

        Args:
            context: Mean context of a running sequence, tokens.
            step_max_s: Target for the time per output token, s; None takes the largest measured.

        Returns:
            Batch (interpolated between measured ones, rounded down) and step time, s. 0 when the
            smallest measured batch misses the target, with the step time of that batch.
        """
        steps, batches = self.step_at(context), np.array(self.batches, dtype=np.float64)
        if step_max_s is None or steps[-1] <= step_max_s:
            return float(batches[-1]), float(steps[-1])
        if steps[0] > step_max_s:
            return 0.0, float(steps[0])
        over = int(np.argmax(steps > step_max_s))
        batch = np.floor(np.interp(step_max_s, steps[over - 1 : over + 1], batches[over - 1 :][:2]))
        return float(batch), float(np.interp(batch, batches, steps))

    def scaled(self, factor: float) -> DecodeProfile:
        """The same table, `factor` times as slow."""
        table = tuple(tuple(step * factor for step in row) for row in self.step_seconds)
        return replace(self, step_seconds=table)


def fixed_decode(name: str, source: str, batch: int, step_seconds: float) -> DecodeProfile:
    """A decode profile of one figure: batch and step time do not depend on the context."""
    return DecodeProfile(name, source, (batch,), (1.0,), ((step_seconds,),))


def prefill_table(profile: PrefillProfile, num_tokens_max: int) -> list[int]:
    """Prefill time at every length from 0 to `num_tokens_max`, ns; 0 at 0."""
    seconds = profile.at(np.arange(num_tokens_max + 1, dtype=np.float64))
    table: list[int] = np.rint(seconds * NS_PER_S).astype(np.int64).tolist()
    table[0] = 0
    return table


def resume_table(profile: PrefillProfile, num_tokens_max: int) -> list[int]:
    """Time of a resumed prefill beside its tokens, ns, for each 2**`RESUME_SHIFT` tokens of prefix:
    that of the one in the middle."""
    step = 1 << RESUME_SHIFT
    prefixes = np.arange(0, num_tokens_max + 1, step, dtype=np.float64) + step / 2
    table: list[int] = np.rint(profile.resume_at(prefixes) * NS_PER_S).astype(np.int64).tolist()
    return table


def make_costs(
    geometry: KvGeometry,
    local: PrefillProfile,
    remote: PrefillProfile,
    *,
    num_tokens_max: int,
    chunk_tokens: int,
    overlap: bool,
) -> Costs:
    """Tables up to `num_tokens_max` tokens."""
    lengths = np.arange(num_tokens_max + 1, dtype=np.float64)
    sizes: list[int] = np.rint(kv_bytes_at(geometry, lengths)).astype(np.int64).tolist()
    return Costs(
        prefill_table(local, num_tokens_max),
        prefill_table(remote, num_tokens_max),
        sizes,
        geometry.state_bytes,
        chunk_tokens,
        overlap,
        local_resume_ns=resume_table(local, num_tokens_max),
        remote_resume_ns=resume_table(remote, num_tokens_max),
    )


StepTime = Callable[[int, float], int]


def step_time(profile: DecodeProfile) -> StepTime:
    """Step time in ns by batch and mean context: linear in between, constant outside."""
    batches, contexts = list(profile.batches), list(profile.contexts)
    table = [[step * NS_PER_S for step in row] for row in profile.step_seconds]
    if len(batches) == len(contexts) == 1:
        only = round(table[0][0])
        return lambda _batch, _context: only

    def at(batch: int, context: float) -> int:
        i, u = _place(batches, float(batch))
        j, v = _place(contexts, context)
        i1, j1 = min(i + 1, len(batches) - 1), min(j + 1, len(contexts) - 1)
        near = table[i][j] * (1 - v) + table[i][j1] * v
        far = table[i1][j] * (1 - v) + table[i1][j1] * v
        return max(round(near * (1 - u) + far * u), 1)

    return at


def _place(knots: list[int] | list[float], x: float) -> tuple[int, float]:
    """Index of the knot at or below `x`, and the share of the way to the next."""
    if x <= knots[0]:
        return 0, 0.0
    if x >= knots[-1]:
        return len(knots) - 1, 0.0
    i = bisect_right(knots, x) - 1
    return i, (x - knots[i]) / (knots[i + 1] - knots[i])
