"""Figures of requests over time: first tokens, gaps between tokens, waits, tokens a second."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

from prfaas.gateway.console.history import HistorySample
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.telemetry.request_records import RequestRecord
from prfaas.units import NS_PER_MS, NS_PER_S

BUCKETS_MAX = 240
STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200, 86_400)
_TIMES = ("ttft", "itl", "queue")


def step_of(duration_s: float) -> float:
    """Return the step that divides a time into at most `BUCKETS_MAX`, seconds."""
    least = duration_s / (BUCKETS_MAX - 1)
    return next((step for step in STEPS_S if step >= least), math.ceil(least))


class RequestSeries:
    """Figures of requests in equal steps of time.

    A request counts in the step in which it came in; its tokens in those in which they were made.

    Attributes:
        since: Unix seconds of the first step, a multiple of the step.
    """

    def __init__(self, since: float, until: float, step_s: float) -> None:
        self.step_s = step_s
        self.since = math.floor(since / step_s) * step_s
        self.num_steps = max(1, math.ceil((until - self.since) / step_s))
        self._now = time.time()
        self._times: dict[str, list[list[int]]] = {
            name: [[] for _ in range(self.num_steps)] for name in _TIMES
        }
        self._counts = [0] * self.num_steps
        self._remote = [0] * self.num_steps
        self._tokens = [0.0] * self.num_steps

    def add(self, record: RequestRecord) -> None:
        """Take in a request that came in between the first and the last step."""
        step = self._step(record.started_unix_s)
        self._counts[step] += 1
        self._remote[step] += record.path == "remote"
        for name, duration_ns in (
            ("ttft", record.ttft_ns),
            ("itl", itl_ns(record)),
            ("queue", record.decided_ns),
        ):
            if duration_ns is not None:
                self._times[name][step].append(duration_ns)
        self._spread(record)

    def _spread(self, record: RequestRecord) -> None:
        """Spread its tokens evenly from its first token to its last."""
        if not record.num_output_tokens:
            return
        began = record.started_unix_s + (record.ttft_ns or record.decided_ns or 0) / NS_PER_S
        ended = record.started_unix_s + (record.e2e_ns or 0) / NS_PER_S
        ended = max(ended if record.e2e_ns is not None else self._now, began)
        until = self.since + self.num_steps * self.step_s
        if began >= until or ended < self.since:
            return
        first, last = self._step(began), self._step(ended)
        if first == last and self.since <= began and ended <= until:
            self._tokens[first] += record.num_output_tokens
            return
        per_s = record.num_output_tokens / (ended - began)
        for step in range(first, last + 1):
            begin = max(began, self.since + step * self.step_s)
            end = min(ended, self.since + (step + 1) * self.step_s)
            self._tokens[step] += per_s * max(end - begin, 0.0)

    def _step(self, at_unix_s: float) -> int:
        return min(max(int((at_unix_s - self.since) / self.step_s), 0), self.num_steps - 1)

    async def as_json(self) -> JsonObject:
        """Lines over the beginnings of steps; None where nothing is known. Serves in between."""
        found: JsonObject = {
            "step_s": self.step_s,
            "at_unix_s": [self.since + step * self.step_s for step in range(self.num_steps)],
            "num_requests": self._counts,
            "num_remote": self._remote,
            "tokens_per_s": [round(tokens / self.step_s, 3) for tokens in self._tokens],
        }
        for name, steps in self._times.items():
            await asyncio.sleep(0)
            ordered = [sorted(times) for times in steps]
            for percent in (50, 90):
                found[f"{name}_p{percent}_ms"] = [_quantile(times, percent) for times in ordered]
        return found


def itl_ns(record: RequestRecord) -> int | None:
    """Mean time between two tokens of a stream's answer; None if it has not ended with several."""
    each = record.num_output_tokens // max(record.num_sequences, 1)
    if record.ttft_ns is None or record.e2e_ns is None or each < 2:
        return None
    return (record.e2e_ns - record.ttft_ns) // (each - 1)


def link_shares(
    samples: Sequence[HistorySample], since: float, step_s: float, num_steps: int
) -> JsonObject:
    """Share of its budget that each link delivered, by step; None for links without a budget."""
    sums: dict[str, list[tuple[float, int]]] = {}
    for sample in samples:
        step = int((sample.at_unix_s - since) / step_s)
        if not 0 <= step < num_steps:
            continue
        for name, link in sample.links.items():
            if link.budget_bits_per_s:
                steps = sums.setdefault(name, [(0.0, 0)] * num_steps)
                total, count = steps[step]
                share = link.carried_bits_per_s / link.budget_bits_per_s
                steps[step] = total + share, count + 1
    return {
        name: [round(total / count, 4) if count else None for total, count in steps]
        for name, steps in sums.items()
    }


def _quantile(ordered: Sequence[int], percent: int) -> float | None:
    if not ordered:
        return None
    return round(ordered[(len(ordered) - 1) * percent // 100] / NS_PER_MS, 3)
