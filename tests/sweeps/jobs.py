"""Jobs of tests; functions of a module, so that workers find them."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.sweeps import SweepJob


def squares(
    folder: Path, count: int = 8, *, fatal: int = -1, times: int = 0
) -> list[SweepJob[int]]:
    """Jobs, one of which kills its worker so many times."""
    return [
        SweepJob(f"square of {i}", partial(square, folder, i, times if i == fatal else 0))
        for i in range(count)
    ]


def square(folder: Path, number: int, times: int) -> int:
    """Count this run in a file, and kill the worker in the first runs."""
    with (folder / str(number)).open("a") as file:
        file.write("x")
    if runs(folder, number) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def runs(folder: Path, number: int) -> int:
    """Runs of a job."""
    return len((folder / str(number)).read_text())


def divide(number: int) -> float:
    """Fail for 0."""
    return 1 / number


def refuse(number: int) -> int:
    """Fail as for an operator's mistake."""
    raise ConfigError(f"{number} is no number of instances")
