"""Core and simulator as extension modules: the same results, and tracebacks that name a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.systems import EXAMPLES

ROOT = Path(__file__).parents[2]
PROBE = '''
"""Prints a digest of everything that happened to the requests of some runs."""

import pickle
import sys
import traceback
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from prfaas.core.dispatch import instances
from prfaas.core.routing.policies import PolicyName
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import load_scenario
from prfaas.sim.system.clock import Clock

print(instances.__file__.rpartition(".")[2])
for name in ("mooncake", "hosts", "instance-down", "link-cut", "sessions-tiers", "two-clusters"):
    scenario = load_scenario(Path(sys.argv[1]) / f"{name}.toml")
    for policy in (PolicyName.ADAPTIVE, PolicyName.PAPER):
        found = run(scenario.with_policy(policy), stop_at_ns=640 * 10**9)
        names = "outcome arrived_at_ns routed_at_ns prefilled_at_ns landed_at_ns first_token_at_ns"
        names += " finished_at_ns num_hit_tokens attempt offloaded"
        told = [[getattr(each, n) for n in names.split()] for each in found.simulation.requests]
        print(name, policy, len(told), sha256(repr(told).encode()).hexdigest())
        sent = replace(scenario.setup, step_ns=max), found.simulation.requests[0].decision
        assert pickle.loads(pickle.dumps(sent)) == sent
try:
    Clock().at(-1, print)
except ValueError:
    print(traceback.extract_tb(sys.exc_info()[2])[-1].lineno)
'''


def probed(package: Path) -> list[str]:
    """Lines of the probe with a package."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", PROBE, str(EXAMPLES)]
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.splitlines()


@pytest.mark.timeout(3600)
def test_a_compiled_simulator_decides_alike_and_its_tracebacks_name_the_line(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, str(ROOT / "hatch_build.py"), str(tmp_path), "0"], check=True)
    pure, compiled = probed(ROOT / "src"), probed(tmp_path)
    assert (pure[0], compiled[0]) == ("py", "so")
    assert compiled[1:] == pure[1:]
    assert len(pure) == 14
