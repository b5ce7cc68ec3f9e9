"""Conversion of `[workload]` to a workload."""

from __future__ import annotations

from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.planner.problem import Workload as PlannedWorkload
from prfaas.sim.workloads.arrivals import RateShape, SineSwing
from prfaas.sim.workloads.scaling import ScaledWorkload, Source
from prfaas.sim.workloads.sessions import Sessions
from prfaas.sim.workloads.synthetic import Synthetic
from prfaas.sim.workloads.table import WorkloadTable
from prfaas.sim.workloads.trace import Trace
from prfaas.traces.formats.columns import AZURE, LENGTHS
from prfaas.traces.formats.detect import CHATS, SESSIONS, detect
from prfaas.traces.formats.rate_curve import read_rate_curve
from prfaas.traces.limits import NUM_PROMPT_TOKENS_MAX
from prfaas.traces.reader import read_requests
from prfaas.traces.sessions.session_file import read_sessions
from prfaas.units import ns

_SWING_PERIOD_S = 3600.0


def make_workload(
    table: WorkloadTable, directory: Path, planned: PlannedWorkload, block_tokens: int
) -> ScaledWorkload:
    """Return the workload of a table.

    Args:
        directory: Where its paths start.
        planned: Lengths of synthetic requests.
        block_tokens: Tokens of a block of the caches.

    Raises:
        ConfigError: A file is wrong, or prompts become too long.
    """
    workload = ScaledWorkload(
        _source(table, directory, planned, block_tokens),
        block_tokens,
        table.prompt_scale,
        table.output_scale,
        table.tenants,
    )
    if workload.num_prompt_tokens_max > NUM_PROMPT_TOKENS_MAX:
        raise ConfigError(
            f"workload: prompts of up to {workload.num_prompt_tokens_max:,} tokens, at most "
            f"{NUM_PROMPT_TOKENS_MAX:,} are simulated; lower workload.prompt_scale"
        )
    return workload


def _source(
    table: WorkloadTable, directory: Path, planned: PlannedWorkload, block_tokens: int
) -> Source:
    path = directory / str(table.trace)
    match table.arrivals:
        case "trace" | "azure":
            form = _azure(path) if table.arrivals == "azure" else None
            rows = read_requests(path, form, block_tokens=block_tokens).rows
            return Trace(rows, ns(table.jitter), table.rate_scale, table.requests)
        case "sessions":
            return Sessions(
                read_sessions(path),
                ns(table.duration),
                block_tokens,
                table.rate,
                table.users,
                float("inf") if table.think_max is None else table.think_max,
            )
        case _:
            return _synthetic(table, directory, planned)


def _azure(path: Path) -> str:
    """Return the format to read a file with that should be Azure's.

    Raises:
        ConfigError: The file holds requests in another format.
    """
    form = detect(path)
    if form in (AZURE.name, SESSIONS, CHATS):
        return form
    if form == LENGTHS.name:
        return AZURE.name  # whose reader names the missing column
    raise ConfigError(
        f'trace {path} is in the format {form}, and arrivals = "azure" reads the format '
        f'{AZURE.name} only; set arrivals = "trace", which reads every format and what prfaas '
        "trace import writes"
    )


def _synthetic(table: WorkloadTable, directory: Path, planned: PlannedWorkload) -> Synthetic:
    assert table.rate is not None  # noqa: S101 (the table was checked)
    return Synthetic(
        rate_per_s=table.rate,
        duration_ns=ns(table.duration),
        lengths=planned.lengths,
        output_tokens=planned.output_tokens,
        arrival_cv=table.cv if table.arrivals != "poisson" else 1.0,
        shape=_shape(table, directory) if table.arrivals == "diurnal" else None,
        fixed_output=table.output == "fixed",
    )


def _shape(table: WorkloadTable, directory: Path) -> RateShape:
    if table.curve is None or table.curve_model is None:
        return SineSwing(table.swing, _SWING_PERIOD_S if table.period is None else table.period)
    return read_rate_curve(directory / table.curve, table.curve_model, table.period)
