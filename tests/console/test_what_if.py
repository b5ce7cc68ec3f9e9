import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.errors import RequestError
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.report.json_report import as_dict
from prfaas.planner.report.what_if import CASE_STUDY, SETTINGS_MAX, answer, overrides_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "paper-case-study.toml"
RANGES = {
    "prfaas.0.link.bandwidth": (1e9, 4e11),
    "prfaas.0.link.rtt": (0.0, 0.2),
    "prfaas.0.link.price_per_tb": (0.0, 30.0),
    "prfaas.0.instances": (1, 12),
    "pd.instances": (2, 24),
    "workload.mu": (8.0, 11.0),
    "workload.sigma": (0.3, 1.6),
    "workload.output_tokens": (64.0, 4096.0),
    "workload.prefix_hit_ratio": (0.0, 0.9),
    "search.threshold": (500.0, 90_000.0),
}


@pytest.mark.parametrize("seed", range(6))
def test_the_sliders_and_prfaas_plan_give_the_same_numbers(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.sample(sorted(RANGES), 4)
    settings = {name: draw.uniform(*RANGES[name]) for name in names}
    overrides = overrides_of(settings)
    command = ["plan", str(EXAMPLE), "--json"]
    printed = CliRunner().invoke(cli, command + [w for o in overrides for w in ("--set", o)])
    assert printed.exit_code == 0, printed.output
    found = answer(EXAMPLE, overrides)
    assert found["plan"] == json.loads(printed.output)
    best = found["plan"]["exact"]["designs"][0]["rate_per_s"]
    assert max(rate for rate in found["split"]["rate"] if rate is not None) == pytest.approx(best)


def test_the_case_study_that_ships_is_the_example() -> None:
    shipped, example = (as_dict(make_plan(load_question(p))) for p in (CASE_STUDY, EXAMPLE))
    assert shipped == example


def test_settings_start_at_the_file_and_follow_changes() -> None:
    found = answer(EXAMPLE, overrides_of({"pd.instances": 6}))
    assert found["settings"]["pd.instances"] == 6
    assert found["settings"]["prfaas.0.link.bandwidth"] == 100e9
    assert found["num_pd"] == 6
    assert len(found["threshold"]["x"]) <= 160


PARENT = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor
from prfaas.planner.report.what_if import end_with_the_gateway
import os
if __name__ == "__main__":
    pool = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_the_gateway
    )
    print(pool.submit(os.getpid).result(), flush=True)
    sys.stdin.read()
"""


def test_the_planner_s_process_ends_with_a_gateway_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([worker], [], [], 50)
        os.close(worker)
    assert ended


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model.config": 1}, "'model.config' is not one of pd.instances"),
        ({"pd.instances": "6"}, "has to be a finite number"),
        ({"pd.instances": float("nan")}, "has to be a finite number"),
        ({"pd.instances": True}, "has to be a finite number"),
        ({"pd.instances": 10**400}, "has to be a finite number"),
        ({f"x{n}": 1 for n in range(SETTINGS_MAX + 1)}, "17 settings; 16 are the limit"),
    ],
)
def test_what_a_setting_may_not_be(settings: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        overrides_of(settings)
