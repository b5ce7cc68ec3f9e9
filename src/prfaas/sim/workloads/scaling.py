"""The same requests with longer or shorter prompts and outputs, and with tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor

import numpy as np

from prfaas.sim.system.request import Request
from prfaas.sim.workloads.sessions import Sessions
from prfaas.sim.workloads.synthetic import Synthetic
from prfaas.sim.workloads.trace import Trace

Source = Synthetic | Trace | Sessions
"""Requests, by seed: the same seed gives the same requests."""


@dataclass(frozen=True, slots=True)
class ScaledWorkload:
    """A source, changed.

    Attributes:
        prompt_scale: Prompts become so many times as long; common prefixes do too.
        output_scale: Factor of output lengths.
        tenants: Share of each tenant, in any unit. Empty keeps those of the source. Requests that
            follow each other have one tenant.
    """

    source: Source
    block_tokens: int = 512
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    tenants: Mapping[str, float] = field(default_factory=dict)

    def requests(self, seed: int) -> list[Request]:
        """Requests that come by themselves, in order of arrival; others follow them.

        Raises:
            ConfigError: They are too many.
        """
        roots = self.source.requests(seed)
        if self.prompt_scale != 1 or self.output_scale != 1:
            for request in with_followers(roots):
                self._scale(request)
        if self.tenants:
            self._assign(roots, np.random.default_rng((seed, 1)))
        return roots

    def with_rate_scaled(self, factor: float) -> ScaledWorkload:
        """The same with `factor` times the load."""
        return replace(self, source=self.source.with_rate_scaled(factor))

    @property
    def num_prompt_tokens_max(self) -> int:
        """Longest prompt, tokens."""
        return ceil(self.source.num_prompt_tokens_max * self.prompt_scale)

    def _scale(self, request: Request) -> None:
        prompt = max(round(request.num_prompt_tokens * self.prompt_scale), 1)
        num_blocks = ceil(prompt / self.block_tokens)
        request.num_prompt_tokens = prompt
        request.num_output_tokens = max(round(request.num_output_tokens * self.output_scale), 1)
        request.block_ids = stretched(request.block_ids, self.prompt_scale, num_blocks)

    def _assign(self, roots: list[Request], rng: np.random.Generator) -> None:
        names = sorted(self.tenants)
        shares = np.array([self.tenants[name] for name in names])
        drawn = rng.choice(len(names), size=len(roots), p=shares / shares.sum())
        for root, i in zip(roots, drawn.tolist(), strict=True):
            for request in with_followers([root]):
                request.tenant = names[i]


def with_followers(roots: Iterable[Request]) -> Iterator[Request]:
    """All requests: those that come by themselves, and those that follow."""
    left = list(roots)
    while left:
        request = left.pop()
        yield request
        left.extend(follower.request for follower in request.followers)


def stretched(block_ids: tuple[int, ...], scale: float, num_blocks_max: int) -> tuple[int, ...]:
    """Ids of a prompt that is `scale` times as long.

    Prompts that share a prefix of n blocks share about `n * scale` afterwards. An id names its
    whole prefix, so the last id of merged blocks names the merged block.

    Args:
        block_ids: Ids from the start of the prompt.
        scale: Above 0.
        num_blocks_max: Blocks of the new prompt; the ids end there.
    """
    pieces = ceil(scale) + 1
    last = min(ceil(len(block_ids) * scale), num_blocks_max)
    found = []
    for i in range(last):
        j = min(ceil((i + 1) / scale) - 1, len(block_ids) - 1)
        found.append(block_ids[j] * pieces + i - floor(j * scale))
    return tuple(found)
