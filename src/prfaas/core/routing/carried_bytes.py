"""Correction of the plan's bytes by those that transfers carried: one bounded factor.

All clusters ship the blocks of one model, so there is one factor for a deployment.

    carried / planned ──► mean by bytes ──► factor ──► later predictions and promises to links

The bytes of blocks are counted, not timed. A few transfers are enough, and small transfers, whose
last block is not full, weigh little.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteSettings:
    """Limits of the correction.

    Attributes:
        num_min: Minimum number of transfers for a factor other than 1.
        num_remembered: Transfers after which the weight of an old one has fallen to 1/e.
        factor_max: Bound of the factor; its inverse is the other one.
        dead_band: Factors between this and its inverse are not applied.
    """

    num_min: int = 4
    num_remembered: int = 32
    factor_max: float = 10_000.0
    dead_band: float = 1.25


class CarriedBytes:
    """Bytes that transfers carried by bytes that the plan has for them."""

    def __init__(self, settings: ByteSettings = ByteSettings()) -> None:
        self._settings = settings
        self.num_samples = 0
        self.factor = 1.0
        """Applied to the plan's bytes; within `factor_max` and its inverse."""
        self._planned = self._carried = 0.0

    def expect(self, planned_bytes: int, real_bytes: int) -> None:
        """Take the ratio of the blocks' layout until transfers have shown another one.

        Args:
            planned_bytes: By the plan, of some prompt.
            real_bytes: Of the blocks that hold it.
        """
        if not self.num_samples and planned_bytes > 0:
            self.factor = self._bounded(real_bytes / planned_bytes)

    def observe(self, planned_bytes: int, carried_bytes: int) -> bool:
        """Record a transfer that landed.

        Args:
            planned_bytes: By the plan, without the factor.
            carried_bytes: As counted at its destination.

        Returns:
            True if the factor has changed.
        """
        settings, before = self._settings, self.factor
        keep = 1 - 1 / settings.num_remembered
        self._planned = keep * self._planned + planned_bytes
        self._carried = keep * self._carried + carried_bytes
        self.num_samples += 1
        if self.num_samples >= settings.num_min and self._planned > 0:
            self.factor = self._bounded(self._carried / self._planned)
        return self.factor != before

    def _bounded(self, factor: float) -> float:
        most, band = self._settings.factor_max, self._settings.dead_band
        if 1 / band < factor < band:
            return 1.0
        return min(max(factor, 1 / most), most)
