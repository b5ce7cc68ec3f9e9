"""Corrections of predictions by observations: one bounded factor per path.

What is compared is the time until decode can begin: until the first token where one engine
prefills and decodes, until the last block has arrived where they are two.

    observed / predicted ──► weighted mean of logarithms ──► factor ──► later predictions
                                     │
                                     └──► error ──► proven or not: admission refuses only on
                                                    predictions that are proven

A sample weighs as much as its prediction is long: a short prompt is dominated by overhead that a
factor does not describe. The factor is 1 within a dead band, so that noise moves no decision.

Correction of the plan's bytes by those that transfers carried: one bounded factor.

All clusters ship the blocks of one model, so there is one factor for a deployment.

    carried / planned ──► mean by bytes ──► factor ──► later predictions and promises to links

The bytes of blocks are counted, not timed. A few transfers are enough, and small transfers, whose
last block is not full, weigh little.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

from prfaas.core.routing.predictions import PathSignals, Prediction
from prfaas.records import Record
from prfaas.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class ByteSettings:
    """Limits of the correction."""

    num_min: int = 4
    """Minimum number of transfers for a factor other than 1."""
    num_remembered: int = 32
    """Transfers after which the weight of an old one has fallen to 1/e."""
    factor_max: float = 10_000.0
    """Bound of the factor; its inverse is the other one."""
    dead_band: float = 1.25
    """Factors between this and its inverse are not applied."""


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
        """Record a transfer that landed; returns true if the factor has changed.

        Args:
            planned_bytes: By the plan, without the factor.
            carried_bytes: As counted at its destination.
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


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Limits of a calibration."""

    num_min: int = 8
    """Minimum sample size for a factor other than 1, and for proven predictions."""
    num_remembered: int = 32
    """Samples after which the weight of an old one has fallen to 1/e."""
    factor_max: float = 10.0
    """Bound of the factor; its inverse is the other one."""
    dead_band: float = 1.25
    """Factors between this and its inverse are not applied."""
    error_max: float = 2.0
    """Typical error, as a ratio, beyond which predictions count as unproven."""
    noise_ns: int = 50_000_000
    """Difference between observed and predicted that is taken for noise."""
    stale_after_ns: int = 300 * NS_PER_S
    """Time without a sample after which predictions count as unproven."""
    proven_first: bool = False
    """Count predictions as proven until samples refute them, for runs whose profiles are exact."""


class Expected(Record, frozen=True):
    """A prediction that waits for its observation."""

    predicted_ns: int
    """Predicted time until decode can begin, with the factor of that moment."""
    factor: float
    predicted_at_ns: int
    """Time when it was predicted."""


class Calibration:
    """The correction of one path: observed by predicted time."""

    def __init__(self, settings: CalibrationSettings = CalibrationSettings()) -> None:
        self._settings = settings
        self.num_samples = 0
        self.factor = 1.0
        """Applied to predictions; within `factor_max` and its inverse."""
        self.is_refuted = False
        """True if there are enough observations, and predictions were far from them."""
        self._weight, self._log_ratio, self._log_error = 0.0, 0.0, 0.0
        self._seen_at_ns = self._since_ns = 0

    def restart(self, now_ns: int) -> None:
        """Forget all observations, also those of earlier predictions that are yet to come."""
        self.num_samples, self.factor, self.is_refuted = 0, 1.0, False
        self._weight, self._log_ratio, self._log_error = 0.0, 0.0, 0.0
        self._since_ns = now_ns

    @property
    def error_ratio(self) -> float:
        """Typical factor, at least 1, between a corrected prediction and the observation."""
        return exp(self._log_error / self._weight) if self._weight else 1.0

    def is_proven(self, now_ns: int) -> bool:
        """Return True if enough recent observations were close to their predictions."""
        settings = self._settings
        if settings.proven_first:
            return not self.is_refuted
        is_fresh = now_ns - self._seen_at_ns <= settings.stale_after_ns
        return self.num_samples >= settings.num_min and is_fresh and not self.is_refuted

    def expect(self, predicted_ns: int, now_ns: int) -> Expected:
        """Remember a prediction that this factor was applied to."""
        return Expected(predicted_ns, self.factor, now_ns)

    def observe(self, expected: Expected, now_ns: int) -> None:
        """Record the observation of a prediction."""
        if expected.predicted_at_ns < self._since_ns:
            return
        settings = self._settings
        observed_ns = max(now_ns - expected.predicted_at_ns, 1)
        raw_ns = max(expected.predicted_ns / expected.factor, 1.0)
        keep = 1 - 1 / settings.num_remembered
        self._weight = keep * self._weight + raw_ns
        ratio = error = self._log(observed_ns, raw_ns)
        if expected.factor != 1.0:
            error = self._log(observed_ns, max(expected.predicted_ns, 1))
        self._log_ratio = keep * self._log_ratio + raw_ns * ratio
        self._log_error = keep * self._log_error + raw_ns * abs(error)
        self.num_samples, self._seen_at_ns = self.num_samples + 1, now_ns
        if self.num_samples >= settings.num_min:
            self.factor = self._bounded(exp(self._log_ratio / self._weight))
            self.is_refuted = self.error_ratio > settings.error_max

    def _log(self, observed_ns: int, predicted_ns: float) -> float:
        """Logarithm of observed by predicted, without what is noise."""
        noise = self._settings.noise_ns
        beyond = observed_ns - predicted_ns
        beyond -= min(max(beyond, -noise), noise)
        return log((predicted_ns + beyond) / predicted_ns)

    def _bounded(self, factor: float) -> float:
        most, band = self._settings.factor_max, self._settings.dead_band
        if 1 / band < factor < band:
            return 1.0
        return min(max(factor, 1 / most), most)


def corrected(found: Prediction, signals: PathSignals, local: float, remote: float) -> Prediction:
    """Return a prediction with both paths multiplied by their factors.

    Waits are left alone: work is booked as long as it is expected to take.
    """
    if local == 1.0 and remote == 1.0:
        return found
    local_apart_ns = (signals.local_wait_ns or 0) + found.local_decode_ns
    remote_wait_ns = signals.remote_wait_ns or 0
    return found._replace(
        local_ns=_times(found.local_ns, local, local_apart_ns),
        remote_ns=_times(found.remote_ns, remote, remote_wait_ns + found.remote_decode_ns),
        computed_ns=_times(found.computed_ns, remote, remote_wait_ns),
    )


def _times(duration_ns: int | None, factor: float, apart_ns: int) -> int | None:
    if duration_ns is None:
        return None
    return round((duration_ns - apart_ns) * factor) + apart_ns
