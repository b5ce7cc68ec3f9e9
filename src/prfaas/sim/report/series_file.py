"""Time series of runs as JSON, for the console's replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from prfaas.sim.engine.time_series import SeriesSample
from prfaas.sim.report.run_figures import RunFigures
from prfaas.units import NS_PER_S

KIND = "prfaas-series"
_COLUMNS: Mapping[str, Callable[[SeriesSample], float]] = {
    "link capacity, bit/s": lambda s: s.link_bits_per_s,
    "link backlog, bytes": lambda s: s.link_backlog_bytes,
    "transfers": lambda s: s.num_flows,
    "work before a PD-P instance, ms": lambda s: s.local_wait_ns / 1e6,
    "work before a PrfaaS instance, ms": lambda s: s.remote_wait_ns / 1e6,
    "offload threshold, tokens": lambda s: s.offload_threshold,
    "requests waiting for decode": lambda s: s.num_decode_waiting,
    "requests decoding": lambda s: s.num_decode_running,
    "PD instances that prefill": lambda s: s.num_prefill,
    "PD instances that decode": lambda s: s.num_decode,
    "PrfaaS instances": lambda s: s.num_prfaas,
}


def series_of(title: str, runs: Mapping[str, RunFigures]) -> dict[str, Any]:
    """JSON values: for each policy the instants, s, and named columns of the same length."""
    return {
        "kind": KIND,
        "title": title,
        "runs": {policy: _run(figures) for policy, figures in runs.items()},
    }


def _run(figures: RunFigures) -> dict[str, Any]:
    at_s = np.array([sample.at_ns / NS_PER_S for sample in figures.samples])
    egress = np.interp(at_s, figures.egress_at_s, figures.egress_bits_per_s)
    columns: dict[str, list[float]] = {
        "link egress, bit/s": [round(float(rate)) for rate in egress]
    }
    columns |= {
        name: [round(value(sample), 3) for sample in figures.samples]
        for name, value in _COLUMNS.items()
    }
    return {"at_s": at_s.round(3).tolist(), "columns": columns}
