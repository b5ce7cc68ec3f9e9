"""A measured rate over time, in ServeGen's form: windows of equal length and the rate in each."""

from __future__ import annotations

import csv
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.sim.workloads.arrivals import Steps
from prfaas.sim.workloads.reading import in_range, read_lines, refuse

COLUMNS = ["model", "t0_s", "rate_rps", "rate_weighted_client_cv"]
NUM_WINDOWS_MAX = 100_000


def read_rate_curve(path: Path, model: str, period_s: float | None = None) -> Steps:
    """The curve of one model.

    Args:
        path: CSV with the columns model, t0_s (start of the window, s), rate_rps,
            rate_weighted_client_cv; windows of one model have equal lengths.
        model: Which model's rows.
        period_s: Length of the whole curve; None keeps its own.

    Raises:
        ConfigError: The file is wrong, or has fewer than two windows of the model.
    """
    starts, rates, models = [], [], set()
    for number, line in read_lines(path):
        cells = next(csv.reader([line.decode("utf-8", "replace").strip()]))
        if number == 1:
            if cells != COLUMNS:
                refuse(path, 1, f"columns {cells[:8]}; expected {COLUMNS}")
            continue
        if len(cells) != len(COLUMNS):
            refuse(path, number, f"{len(cells)} values; expected {', '.join(COLUMNS)}")
        models.add(cells[0])
        if cells[0] != model:
            continue
        starts.append(_number(path, number, 1, cells))
        rates.append(_number(path, number, 2, cells))
        _check_window(path, number, starts)
    if len(rates) < 2 or not any(rates):
        known = ", ".join(sorted(models)[:20])
        raise ConfigError(f"{path}: no curve of {model!r}; there are {known or 'none'}")
    own_s = (starts[1] - starts[0]) * len(rates)
    return Steps(tuple(rates), own_s if period_s is None else period_s)


def _number(path: Path, line: int, column: int, cells: list[str]) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        refuse(path, line, f"{COLUMNS[column]} is {cells[column][:40]!r}; expected a number")
    in_range(path, line, COLUMNS[column], value, 0, 1e9)
    return value


def _check_window(path: Path, line: int, starts: list[float]) -> None:
    if len(starts) > NUM_WINDOWS_MAX:
        refuse(path, line, f"more than {NUM_WINDOWS_MAX:,} windows")
    if len(starts) < 2:
        return
    expected = starts[0] + (starts[1] - starts[0]) * (len(starts) - 1)
    if starts[1] <= starts[0] or starts[-1] != expected:
        refuse(path, line, f"t0_s is {starts[-1]:g}; expected {expected:g}, as windows are equal")
