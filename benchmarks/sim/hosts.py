"""Hosts of a cluster, simulated: the same memory on 1, 2, 4 and 8 PD hosts, with and without pulls.

    python benchmarks/sim/hosts.py [--requests 12031]

Mooncake's conversation on the case study's machines; the PrfaaS cluster, which has four instances,
has up to four hosts. `docs/results/hosts.md` has the figures.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from prfaas.core.dispatch.hosts import Hosts
from prfaas.sim.resources.transport import Transport
from prfaas.sim.scenario.run import ScenarioRun, run
from prfaas.sim.scenario.scenario_loader import load_scenario

SCENARIO = Path(__file__).parents[2] / "examples" / "sim" / "mooncake.toml"
HOSTS, PRFAAS_MAX = (1, 2, 4, 8), 4
BANDWIDTH = "25Gbps"


@contextmanager
def pulls(num_made: Counter[bool], *, allowed: bool) -> Iterator[None]:
    """Count pulls between hosts, which have no price, and those from another cluster."""
    pull = Transport.pull

    def counted(self: Transport, *arguments: object) -> None:
        num_made[self.setup.price_per_tb == 0] += 1
        pull(self, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(Transport, "pull", counted):
        if allowed:
            yield
            return
        with mock.patch.object(Hosts, "fetch", return_value=None):
            yield


def simulated(num_hosts: int, num_requests: int) -> ScenarioRun:
    """One run with the default seed."""
    settings = [
        f"workload.requests={num_requests}",
        f"hosts.pd={num_hosts}",
        f"hosts.prfaas={min(num_hosts, PRFAAS_MAX)}",
        f'hosts.bandwidth="{BANDWIDTH}"',
    ]
    return run(load_scenario(SCENARIO, settings))


def row(num_hosts: int, num_requests: int, *, allowed: bool) -> str:
    """A row of the table."""
    made: Counter[bool] = Counter()
    with pulls(made, allowed=allowed):
        results = simulated(num_hosts, num_requests).results
    between = [t["bytes"] for name, t in results.traffic.items() if name.startswith("hosts of ")]
    pulled, handed = (sum(each[p] for each in between) / 1e9 for p in ("pull", "handoff"))
    ttft = results.time_to_first_token
    figures = (f"{ttft[name] / 1000:.2f}" for name in ("avg", "p50", "p99"))
    hits, words = f"{results.prefix_hit_ratio:.1%}", "yes" if allowed else "no"
    cells = num_hosts, words, hits, f"{made[True]:,}", f"{pulled:,.0f}", f"{handed:,.0f}", *figures
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=12_031)
    num_requests = parser.parse_args().requests
    print("| hosts | pulls | hits | made | pulled, GB | handed over, GB | TTFT, s | P50 | P99 |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for num_hosts in HOSTS:
        for allowed in (True, False) if num_hosts > 1 else (True,):
            print(row(num_hosts, num_requests, allowed=allowed), flush=True)


if __name__ == "__main__":
    main()
