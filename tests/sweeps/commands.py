"""A short sweep by `prfaas simulate`."""

from __future__ import annotations

import json

from click.testing import CliRunner

from prfaas.cli.plan.simulate_command import simulate
from tests.sim.systems import EXAMPLES

SHORT = ("--set", 'workload.duration="3min"', "--set", 'workload.warmup="0s"')
SWEEP = (str(EXAMPLES / "paper-poisson.toml"), *SHORT, "--policy", "paper", "--policy", "remote")


def digests(*words: str) -> dict[str, list[str]]:
    made = CliRunner().invoke(simulate, [*SWEEP, "--seeds", "2", "--json", *words])
    assert made.exit_code == 0, made.output
    found: dict[str, list[str]] = json.loads(made.stdout)["digests"]
    return found
