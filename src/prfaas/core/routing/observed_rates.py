"""Observed prefill rates, for deployments without a plan to predict from.

Work is counted in a nominal time per token; how many times as long prefills really take is learnt
by cluster, with the calibration that corrects predictions of a plan. It says when a prefill that
has not answered is hardly going to; `first_tokens` routes by it.
"""

from __future__ import annotations

from prfaas.core.routing.calibration import Calibration, CalibrationSettings, Expected

NOMINAL_NS_PER_TOKEN = 100_000
"""Orders instances by their load without profiles."""
PACE = CalibrationSettings(factor_max=10_000.0, dead_band=1.0, noise_ns=0)


class Paces:
    """Rates of clusters, and prefills that were sent to them and have not answered.

    Args:
        settings: Of the factors.
    """

    def __init__(self, settings: CalibrationSettings = PACE) -> None:
        self._settings = settings
        self._by_cluster: dict[str, Calibration] = {}
        self._open: dict[int, tuple[Calibration, Expected]] = {}

    def sent(self, request_id: int, cluster: str, nominal_ns: int, now_ns: int) -> None:
        """A prefill is sent to a cluster; `nominal_ns` is the work before it and its own."""
        pace = self._by_cluster.setdefault(cluster, Calibration(self._settings))
        expected_ns = max(round(nominal_ns * pace.factor), 1)
        self._open[request_id] = pace, pace.expect(expected_ns, now_ns)

    def answered(self, request_id: int, now_ns: int) -> None:
        """A prefill has answered: its cluster's rate is learnt from."""
        found = self._open.pop(request_id, None)
        if found is not None:
            pace, expected = found
            pace.observe(expected, now_ns)

    def drop(self, request_id: int) -> None:
        """Discard a prefill without an observation."""
        self._open.pop(request_id, None)

    def expected_ns(self, request_id: int) -> int | None:
        """Expected duration of a prefill that has not answered, ns; None while nothing is known."""
        found = self._open.get(request_id)
        if found is None or found[0].num_samples < PACE.num_min:
            return None
        return found[1].predicted_ns

    def estimated_ns(self, cluster: str, nominal_ns: int) -> int | None:
        """Expected duration of that much work in a cluster, ns; None while nothing is known."""
        pace = self._by_cluster.get(cluster)
        if pace is None or pace.num_samples < PACE.num_min:
            return None
        return round(nominal_ns * pace.factor)

    def proven_ns(self, cluster: str, nominal_ns: int, now_ns: int) -> int | None:
        """Like `estimated_ns`; also None while samples are old or inconsistent."""
        pace = self._by_cluster.get(cluster)
        if pace is None or pace.num_samples < PACE.num_min or not pace.is_proven(now_ns):
            return None
        return max(round(nominal_ns * pace.factor), 1)
