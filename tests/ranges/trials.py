"""Tries every number of a file at the edge of its range; prints what neither answers nor refuses.

    python -m tests.ranges.trials plan|scenario|deployment|contracts|prices FILE

A process of its own with 4 GiB of memory, so that what would take all memory shows, and with a
time for each trial that a busy machine keeps.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
import tomllib
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError
from tests.ranges.number_keys import number_keys, setting, values

_MEMORY_BYTES = 4 << 30
_SECONDS_MAX = 300


class _LateError(BaseException):
    pass


def plan(path: Path, change: str) -> None:
    """Answer a plan with one change."""
    from rich.console import Console

    from prfaas.planner.answer.plan import make_plan
    from prfaas.planner.answer.plan_loader import load_question
    from prfaas.planner.report import json_report
    from prfaas.planner.report.terminal import print_plan

    answer = make_plan(load_question(path, [change]))
    json.dumps(json_report.as_dict(answer), allow_nan=False)
    print_plan(answer, Console(file=io.StringIO(), width=100))


def scenario(path: Path, change: str) -> None:
    """Simulate a scenario with one change."""
    from prfaas.sim.scenario.run import run
    from prfaas.sim.scenario.scenario_loader import load_scenario

    run(load_scenario(path, [change]))


def _reads(model: type[Any]) -> Callable[[Path, str], None]:
    def read(path: Path, change: str) -> None:
        from prfaas.planner.answer.plan_loader import override
        from prfaas.toml_tables import read_toml, validated

        tables = read_toml(path)
        override(tables, change)
        validated(model, tables, path)

    return read


def _kind(name: str) -> tuple[type[Any], Callable[[Path, str], None]]:
    """The type of a file, and what is done with it."""
    if name == "plan":
        from prfaas.planner.answer.plan_file import PlanFile

        return PlanFile, plan
    if name == "scenario":
        from prfaas.sim.scenario.scenario_file import ScenarioFile

        return ScenarioFile, scenario
    if name == "deployment":
        from prfaas.config.deployment import Deployment

        return Deployment, _reads(Deployment)
    if name == "contracts":
        from prfaas.config.governance.contracts import ContractsFile

        return ContractsFile, _reads(ContractsFile)
    from prfaas.config.market.prices import PriceFile

    return PriceFile, _reads(PriceFile)


def main() -> None:
    """Print the failures as JSON."""
    model, attempt = _kind(sys.argv[1])
    path = Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _late)
    warnings.simplefilter("error")
    tables = tomllib.loads(path.read_text())
    changes = [setting(k, v) for k, unit in number_keys(model, tables) for v in values(unit)]
    failures = {change: why for change in changes if (why := _failure(attempt, path, change))}
    print(json.dumps({"trials": len(changes), "failures": failures}))


def _failure(attempt: Callable[[Path, str], None], path: Path, change: str) -> str:
    signal.alarm(_SECONDS_MAX)
    try:
        attempt(path, change)
    except ConfigError:
        return ""
    except (_LateError, Exception) as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return f"{type(problem).__name__}: {problem} ({where})"
    finally:
        signal.alarm(0)
    return ""


def _late(_signal: int, _frame: object) -> None:
    raise _LateError(f"no end within {_SECONDS_MAX} s")


if __name__ == "__main__":
    main()
