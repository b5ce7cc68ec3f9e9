"""Recorded requests, replayed at their instants whatever the answers take: an open loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from prfaas.sim.system.request import Request
from prfaas.traces.requests import RecordedRequest


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests.

    Attributes:
        jitter_ns: Each arrival is moved by up to so much, within the trace's tick.
        rate_scale: Arrivals come so many times as fast.
        num_requests_max: Only the first so many; None is all.
    """

    rows: tuple[RecordedRequest, ...]
    jitter_ns: int = 0
    rate_scale: float = 1.0
    num_requests_max: int | None = None

    def requests(self, seed: int) -> list[Request]:
        """The requests, in order of arrival."""
        rng, count = np.random.default_rng(seed), len(self.rows)
        jitters = rng.integers(self.jitter_ns, size=count).tolist() if self.jitter_ns else []
        found = [
            (round((row.at_ns + jitter) / self.rate_scale), row)
            for row, jitter in zip(self.rows, jitters or [0] * count, strict=True)
        ]
        found.sort(key=itemgetter(0))
        return [
            Request(i, at_ns, r.num_prompt_tokens, r.num_output_tokens, r.block_ids, r.tenant)
            for i, (at_ns, r) in enumerate(found[: self.num_requests_max])
        ]

    def with_rate_scaled(self, factor: float) -> Trace:
        """The same, `factor` times as fast."""
        return replace(self, rate_scale=self.rate_scale * factor)

    @property
    def num_prompt_tokens_max(self) -> int:
        """The longest prompt, tokens."""
        return max(row.num_prompt_tokens for row in self.rows)
