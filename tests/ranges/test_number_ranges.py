"""Every number of every file: an answer, or an error of one line, in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PLAN = _ROOT / "examples" / "plan" / "paper-case-study.toml"
_PROFILES = _ROOT / "examples" / "plan" / "profiles"
_SCENARIO = """
title = "a minute"
plan = "{plan}"
[workload]
rate = 1.0
duration = "60s"
[cache]
pd_blocks = 1000
[cache.shares]
a = [0.1, 0.5]
[routing.weights]
a = 1.0
[workload.tenants]
a = 1.0
[slo]
ttft = "10s"
[prices."H200 cluster"]
gpu_hour = 1.0
[[failure]]
kind = "link"
at = "20s"
duration = "10s"
"""
_PRICES = """
[prices.prfaas]
gpu_hour = 2.0
per_tb = 1.0
watts = 100.0
revocable = true
notice = "2min"
"""


def _trials(kind: str, path: Path) -> tuple[int, dict[str, str]]:
    output = subprocess.run(
        [sys.executable, "-m", "tests.ranges.trials", kind, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=880,
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    ).stdout
    found = json.loads(output.strip().splitlines()[-1])
    return found["trials"], found["failures"]


def _inline_profiles(tmp_path: Path) -> Path:
    """A plan with a table for every number, its profiles inside."""
    plan = _PLAN.read_text()
    for name, place in (("paper-8xh200-1t", "prfaas"), ("paper-8xh20-1t", "pd")):
        tables = (_PROFILES / f"{name}.toml").read_text()
        tables = tables.replace("[prefill]", f"[{place}.prefill]")
        plan += "\n" + tables.replace("[decode]", f"[{place}.decode]")
    plan = "\n".join(line for line in plan.splitlines() if not line.startswith("profile ="))
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    return path


@pytest.mark.timeout(900)
def test_numbers_of_a_plan_are_answered_or_refused(tmp_path: Path) -> None:
    num_trials, failures = _trials("plan", _inline_profiles(tmp_path))
    assert failures == {}
    assert num_trials > 350


@pytest.mark.timeout(900)
def test_numbers_of_a_plan_by_roofline_are_answered_or_refused() -> None:
    num_trials, failures = _trials("plan", _PLAN.with_name("qwen3.5-397b.toml"))
    assert failures == {}
    assert num_trials > 300


@pytest.mark.timeout(900)
def test_numbers_of_a_scenario_are_simulated_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(_SCENARIO.format(plan=_PLAN))
    num_trials, failures = _trials("scenario", path)
    assert failures == {}
    assert num_trials > 450


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("deployment", "examples/timing.toml"),
        ("deployment", "examples/laptop.toml"),
        ("deployment", "examples/two-sites.toml"),
        ("contracts", "examples/shared-service/contracts.toml"),
        ("prices", None),
    ],
)
@pytest.mark.timeout(300)
def test_numbers_of_other_files_are_read_or_refused(
    kind: str, file: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "prices.toml" if file is None else _ROOT / file
    if file is None:
        path.write_text(_PRICES)
    num_trials, failures = _trials(kind, path)
    assert failures == {}
    assert num_trials > 0
