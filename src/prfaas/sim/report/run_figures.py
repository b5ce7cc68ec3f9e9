"""Data of one run for the report, so that the run itself is not kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prfaas.planner.model.kv_geometry import FloatArray
from prfaas.sim.engine.time_series import SeriesSample
from prfaas.sim.results.columns import FinishedRequests, columns_of, have_finished
from prfaas.sim.results.link_traffic import window_bytes
from prfaas.sim.results.summary import Results
from prfaas.sim.scenario.run import ScenarioRun
from prfaas.units import BITS_PER_BYTE, NS_PER_MS, NS_PER_S

NUM_POINTS_MAX = 400
_RATIOS = np.concatenate([np.linspace(0, 0.99, 200), np.linspace(0.99, 1, 51)[1:]])


@dataclass(frozen=True)
class RunFigures:
    """One run.

    Attributes:
        egress_at_s: Middle of each span of the egress, s.
        egress_bits_per_s: Mean egress of each span.
        ttft_s: TTFT at each of `ratios`, s.
        tpot_ms: TPOT at each of `ratios`, ms.
        ratios: Shares of the requests, in [0, 1].
    """

    results: Results
    samples: list[SeriesSample]
    egress_at_s: FloatArray
    egress_bits_per_s: FloatArray
    ttft_s: FloatArray
    tpot_ms: FloatArray
    ratios: FloatArray


def figures_of(run: ScenarioRun) -> RunFigures:
    """Take from a run what the report draws."""
    scenario, sim = run.scenario, run.simulation
    end_ns = scenario.end_ns or sim.clock.now_ns + 1
    columns = columns_of(sim.requests)
    came = columns["arrived_at_ns"]
    is_in_window = (scenario.start_ns <= came) & (came < end_ns)
    done = FinishedRequests(columns.chosen(have_finished(sim.requests) & is_in_window))
    at_s, egress = _egress(window_bytes(sim.links), sim.clock.now_ns)
    return RunFigures(
        run.results,
        _thinned(sim.series.samples),
        at_s,
        egress,
        _quantiles(done.ttft_ns / NS_PER_S),
        _quantiles(done.tpot_ns[done.has_steps] / NS_PER_MS),
        _RATIOS,
    )


def _quantiles(values: FloatArray) -> FloatArray:
    return np.asarray(np.quantile(values, _RATIOS) if len(values) else values, np.float64)


def _egress(window_bytes: dict[int, float], now_ns: int) -> tuple[FloatArray, FloatArray]:
    """Mean of the one-second windows over spans that are as long as the drawing asks for."""
    count = now_ns // NS_PER_S + 1
    sent = np.zeros(count)
    for window, num_bytes in window_bytes.items():
        if window < count:
            sent[window] = num_bytes
    span = -(-count // NUM_POINTS_MAX)
    starts = np.arange(0, count, span)
    lengths = np.minimum(starts + span, count) - starts
    means = np.add.reduceat(sent, starts) / lengths * BITS_PER_BYTE
    return starts + lengths / 2, means


def _thinned(samples: list[SeriesSample]) -> list[SeriesSample]:
    step = -(-len(samples) // NUM_POINTS_MAX) if samples else 1
    return samples[::step]
