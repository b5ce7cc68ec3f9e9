"""Metrics of verification."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from prfaas.core.integrity.suspicion import Suspicion
from prfaas.series import Families, at_zero

OUTCOMES = ("equal", "altered", "unattributed", "empty", "unknown", "skipped")


class VerificationMetrics:
    """Outcomes, and the largest difference that was seen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Families(registry)
        self._outcomes = make.counter(
            "verifications",
            "Transfers that were selected for verification: equal, altered, unattributed (altered, "
            "and no source is barred for certain), empty (no block had come), unknown or skipped",
            "outcome",
        )
        at_zero(self._outcomes, OUTCOMES)
        self._tokens = make.counter(
            "verification_tokens", "Prompt tokens that PD engines computed again"
        )
        self._worst = make.gauge(
            "verification_difference",
            "Largest relative difference of received blocks since the start, by type",
            "dtype",
        )
        self._suspicions = make.counter(
            "verification_suspicions",
            "Alarms about sources that verification does not reach, by reason: unknown (most of "
            "their transfers cannot be compared) or not_committed (they stop transfers of which "
            "all blocks have arrived)",
            "reason",
        )
        at_zero(self._suspicions, Suspicion)
        self._differences: dict[str, float] = {}

    def ended(self, outcome: str, num_tokens: int = 0) -> None:
        """A verification ended.

        Args:
            outcome: One of `OUTCOMES`; "equal" is within the limits.
            num_tokens: Prompt tokens that were computed again.
        """
        self._outcomes.labels(outcome).inc()
        self._tokens.inc(num_tokens)

    def suspected(self, reason: Suspicion) -> None:
        """Count an alarm about a source."""
        self._suspicions.labels(reason).inc()

    def differed(self, worst: Mapping[str, float]) -> None:
        """Blocks were compared."""
        for dtype, value in worst.items():
            self._differences[dtype] = max(value, self._differences.get(dtype, 0.0))
            self._worst.labels(dtype).set(self._differences[dtype])
