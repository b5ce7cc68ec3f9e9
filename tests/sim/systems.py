"""Small systems for tests: constant or given service times, no surprises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prfaas.core.routing.policies import PolicyName
from prfaas.core.routing.predictions import Costs
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import (
    CacheSetup,
    ClusterSetup,
    DecodeLimits,
    LinkSetup,
    RoutingSetup,
    Setup,
    SignalSetup,
)
from prfaas.toml_tables import read_toml
from prfaas.units import NS_PER_S

EXAMPLES = Path(__file__).parents[2] / "examples" / "sim"
MS = NS_PER_S // 1000
NUM_TOKENS_MAX = 20_000
NO_CACHE = CacheSetup()
QUIET = SignalSetup(interval_ns=1000 * NS_PER_S, loop_interval_ns=1000 * NS_PER_S)
"""Hardly any reports: the gateway lives on what it sent itself."""


def linear_costs(
    *,
    local_ns: int = MS,
    remote_ns: int = MS,
    token_bytes: int = 1000,
    state_bytes: int = 0,
    fixed_ns: int = 0,
) -> Costs:
    """Prefill times and bytes in proportion to tokens, and a fixed time of each prefill."""
    tokens = range(NUM_TOKENS_MAX + 1)
    return Costs(
        [fixed_ns + n * local_ns for n in tokens],
        [fixed_ns + n * remote_ns for n in tokens],
        [state_bytes + n * token_bytes for n in tokens],
        state_bytes,
        chunk_tokens=1000,
    )


def system(
    *,
    policy: PolicyName = PolicyName.LOCAL,
    threshold: int = 1000,
    num_prfaas: int = 1,
    num_prefill: int = 1,
    num_decode: int = 1,
    bits_per_s: float = 1e9,
    costs: Costs | None = None,
    batch_max: int = 1_000_000,
    step_ns: int = MS,
    signals: SignalSetup = QUIET,
    link: LinkSetup | None = None,
    cache: CacheSetup = NO_CACHE,
) -> Setup:
    """A setup whose decode never binds unless told otherwise; `cache` is the PrfaaS cluster's."""
    costs = costs or linear_costs()
    return Setup(
        prfaas=(ClusterSetup("prfaas", num_prfaas, costs, link or LinkSetup(bits_per_s), cache),),
        num_prefill=num_prefill,
        num_decode=num_decode,
        costs=costs,
        step_ns=lambda _batch, _context: step_ns,
        decode=DecodeLimits(batch_max),
        routing=RoutingSetup(policy, threshold),
        signals=signals,
    )


def requests_at(instants_ns: list[int], prompts: list[int], output: int = 1) -> list[Request]:
    """Requests at given instants."""
    rows = zip(instants_ns, prompts, strict=True)
    return [Request(i, at, prompt, output) for i, (at, prompt) in enumerate(rows)]


def short(example: Path, settings: Sequence[str] = (), *, minutes: int = 4) -> Scenario:
    """An example cut to its first minutes, or to the first requests of its trace.

    What breaks does so after ten seconds, for ten.
    """
    tables = read_toml(example)
    cut = [f'workload.duration="{minutes}min"', 'workload.warmup="0s"']
    if tables["workload"].get("arrivals") in ("trace", "azure"):
        cut = ["workload.requests=300"]
    if "users" in tables["workload"]:
        cut.append("workload.users=20")
    for index in range(len(tables.get("failure", []))):
        cut += [f'failure.{index}.at="10s"', f'failure.{index}.duration="10s"']
    return load_scenario(example, [*cut, *settings])
