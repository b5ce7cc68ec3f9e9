"""Interface of workloads: requests by seed, and the same at another rate."""

from __future__ import annotations

from typing import Protocol

from prfaas.sim.system.request import Request


class Source(Protocol):
    """Requests, by seed. The same seed gives the same requests."""

    def requests(self, seed: int) -> list[Request]:
        """Requests that come by themselves, in order of arrival; others follow them.

        Raises:
            ConfigError: They are too many.
        """

    def with_rate_scaled(self, factor: float) -> Source:
        """The same with `factor` times the load."""

    @property
    def num_prompt_tokens_max(self) -> int:
        """Longest prompt, tokens."""
