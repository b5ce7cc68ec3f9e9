"""A measured rate over time, in ServeGen's form: windows of equal length and the rate in each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import ConfigError
from prfaas.traces.checks import DroppedError, in_range
from prfaas.traces.formats.columns import cells_of
from prfaas.traces.lines import read_lines, refuse, text_of

COLUMNS = ["model", "t0_s", "rate_rps", "rate_weighted_client_cv"]
NUM_WINDOWS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class Steps:
    """A rate that is constant within windows of equal length; the curve repeats.

    Attributes:
        rates: Rate in each window, in any unit; not all 0.
        period_s: Length of the whole curve.
    """

    rates: tuple[float, ...]
    period_s: float

    def knots(self, until_s: float) -> NDArray[np.float64]:
        """The windows' edges."""
        edges = np.arange(0, until_s, self.period_s / len(self.rates), dtype=np.float64)
        return np.append(edges, until_s)

    def integral(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Whole periods, and the part of the last one."""
        shares = np.cumsum((0.0, *self.rates)) / sum(self.rates) * self.period_s
        edges = np.linspace(0, self.period_s, len(self.rates) + 1)
        periods, within = np.divmod(at_s, self.period_s)
        return np.asarray(periods * self.period_s + np.interp(within, edges, shares))


def read_rate_curve(path: Path, model: str, period_s: float | None = None) -> Steps:
    """The curve of one model.

    Args:
        path: CSV with the columns model, t0_s (start of the window, s), rate_rps,
            rate_weighted_client_cv; windows of one model have equal lengths.
        period_s: Length of the whole curve; None keeps its own.

    Raises:
        ConfigError: The file is wrong, or has fewer than two windows of the model.
    """
    starts: list[float] = []
    rates: list[float] = []
    models: set[str] = set()
    for number, line in read_lines(path):
        try:
            cells = _cells(number, text_of(line))
            models.update(cells[:1])
            if number > 1 and cells[0] == model:
                starts.append(_number(1, cells))
                rates.append(_number(2, cells))
                _check_window(starts)
        except DroppedError as error:
            refuse(path, number, str(error))
    models.discard(COLUMNS[0])
    if len(rates) < 2 or not any(rates):
        known = ", ".join(sorted(models)[:20])
        raise ConfigError(f"{path}: no curve of {model!r}; there are {known or 'none'}")
    own_s = (starts[1] - starts[0]) * len(rates)
    return Steps(tuple(rates), own_s if period_s is None else period_s)


def _cells(number: int, line: bytes) -> list[str]:
    cells = cells_of(line)
    if number == 1 and cells != COLUMNS:
        raise DroppedError(f"columns {cells[:8]}; expected {COLUMNS}")
    if len(cells) != len(COLUMNS):
        raise DroppedError(f"{len(cells)} values; expected {', '.join(COLUMNS)}")
    return cells


def _number(column: int, cells: list[str]) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        raise DroppedError(
            f"{COLUMNS[column]} is {cells[column][:40]!r}; expected a number"
        ) from None
    in_range(COLUMNS[column], value, 0, 1e9)
    return value


def _check_window(starts: list[float]) -> None:
    if len(starts) > NUM_WINDOWS_MAX:
        raise DroppedError(f"more than {NUM_WINDOWS_MAX:,} windows")
    if len(starts) < 2:
        return
    expected = starts[0] + (starts[1] - starts[0]) * (len(starts) - 1)
    if starts[1] <= starts[0] or starts[-1] != expected:
        raise DroppedError(f"t0_s is {starts[-1]:g}; expected {expected:g}, as windows are equal")
