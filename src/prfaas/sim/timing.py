"""Prefill times, decode step times and KV bytes as tables that cost one index to read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prfaas.planner.geometry import KvGeometry, kv_bytes_at
from prfaas.planner.profiles import DecodeProfile, PrefillProfile
from prfaas.units import NS_PER_S

StepTime = Callable[[int, float], int]


def prefill_table(profile: PrefillProfile, num_tokens_max: int) -> list[int]:
    """Prefill time at every length from 0 to `num_tokens_max`, ns; 0 at 0."""
    seconds = profile.at(np.arange(num_tokens_max + 1, dtype=np.float64))
    table: list[int] = np.rint(seconds * NS_PER_S).astype(np.int64).tolist()
    table[0] = 0
    return table


@dataclass(frozen=True, slots=True)
class Costs:
    """What compute and bytes cost: the core's `CostModel`, and the simulator's own clockwork.

    Attributes:
        local_ns: Prefill time of a PD-P instance by new tokens.
        remote_ns: The same of a PrfaaS instance.
        bytes_of: KV bytes by prompt tokens.
        state_bytes: Part of them that does not depend on the length.
        chunk_tokens: Prefill chunk.
        overlap: Ship chunk by chunk while computing; else everything after prefill.
    """

    local_ns: list[int]
    remote_ns: list[int]
    bytes_of: list[int]
    state_bytes: int
    chunk_tokens: int
    overlap: bool = True

    def local_prefill_ns(self, num_new_tokens: int) -> int:
        """Prefill time of a PD-P instance, ns."""
        return self.local_ns[max(num_new_tokens, 1)]

    def remote_prefill_ns(self, num_new_tokens: int) -> int:
        """Prefill time of a PrfaaS instance, ns."""
        return self.remote_ns[max(num_new_tokens, 1)]

    def shipped_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """KV bytes beyond a prefix that is there already; the state is shipped whole."""
        present = self.bytes_of[present_tokens] - self.state_bytes if present_tokens else 0
        return self.bytes_of[num_prompt_tokens] - present

    def kv_bytes(self, num_tokens: int) -> int:
        """KV bytes of a sequence; the longest in the table stands for longer ones."""
        return self.bytes_of[min(num_tokens, len(self.bytes_of) - 1)]

    def tail_bytes(self, num_prompt_tokens: int, present_tokens: int) -> int:
        """Bytes of the last chunk, and the state."""
        if not self.overlap:
            return self.shipped_bytes(num_prompt_tokens, present_tokens)
        last = (num_prompt_tokens - present_tokens - 1) % self.chunk_tokens + 1
        return self.shipped_bytes(num_prompt_tokens, num_prompt_tokens - last)

    def chunks(self, num_new_tokens: int) -> list[tuple[int, int]]:
        """End of every remote chunk: tokens computed, and ns since the start of prefill."""
        table, step = self.remote_ns, self.chunk_tokens
        if not self.overlap:
            step = num_new_tokens
        ends = [*range(step, num_new_tokens, step), num_new_tokens]
        return [(end, table[end]) for end in ends]


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
    )


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
