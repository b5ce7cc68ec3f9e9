"""The same seed gives the same digest, however Python hashes strings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.systems import EXAMPLES

ROOT = Path(__file__).parents[2]
PROGRAM = """
from prfaas.sim.scenario.run import run
import pytest

from tests.sim.systems import EXAMPLES, short

TENANTS = ["workload.tenants.a=1", "workload.tenants.b=2", "workload.prompt_scale=0.5"]
for example in sorted(EXAMPLES.glob("*.toml")):
    found = run(short(example, TENANTS if example.stem == "claude-code" else (), minutes=1))
    tenants = [request.tenant for request in found.simulation.requests]
    print(example.stem, found.results.digest, tenants[:100])
"""


@pytest.mark.timeout(180)
def test_no_example_depends_on_the_hash_seed() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "4242")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"\n") == len(list(EXAMPLES.glob("*.toml")))
