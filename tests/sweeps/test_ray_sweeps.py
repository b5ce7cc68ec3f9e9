"""Sweeps on a Ray cluster of two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_nodes.cluster import NEEDS_RAY, RayNodes, ray_nodes
from tests.sweeps import jobs
from tests.sweeps.commands import SWEEP, digests

pytestmark = [NEEDS_RAY, pytest.mark.timeout(300)]
LOSS = """
import sys
from pathlib import Path
from prfaas.sweeps import SweepPlace, run_jobs
from tests.sweeps import jobs
place = SweepPlace(2, sys.argv[1])
print(sorted(run_jobs(jobs.squares(Path(sys.argv[2]), fatal=3, times=1), place)))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(1, 1) as found:
        yield found


def ran(nodes: RayNodes, *words: str) -> str:
    made = subprocess.run(
        [sys.executable, *words],
        env=nodes.env,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_a_sweep_on_ray_has_the_digests_of_one_process(nodes: RayNodes) -> None:
    words = ("-m", "prfaas", "simulate", *SWEEP, "--seeds", "2", "--json", "--ray", nodes.address)
    assert json.loads(ran(nodes, *words))["digests"] == digests("--jobs", "1")


def test_a_worker_killed_on_ray_loses_no_job(nodes: RayNodes, tmp_path: Path) -> None:
    found = ran(nodes, "-c", LOSS, nodes.address, str(tmp_path))
    assert found.strip() == str([(i, i * i) for i in range(8)])
    assert jobs.runs(tmp_path, 3) == 2
