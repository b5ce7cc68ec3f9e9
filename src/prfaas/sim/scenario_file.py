"""The scenario file: tables and units of a TOML file that describes a simulated run.

Clusters, profiles, model, lengths and prices come from a plan file, which the planner reads too.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from prfaas.core.policies import PolicyName
from prfaas.planner.plan_file import BitsPerSecond, Seconds
from prfaas.sim.setup import FailureKind
from prfaas.sim.workloads.table import WorkloadTable

Count = Annotated[int, Field(ge=0)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RoutingTable(_Table):
    """`[routing]`: who decides, and on what instances."""

    policy: PolicyName = PolicyName.ADAPTIVE
    """local, remote, paper or adaptive."""
    threshold: Count | None = None
    """Offload threshold, tokens; the planner's optimum if absent."""
    prefill_instances: Count | None = None
    """PD instances that prefill; the planner's optimum if absent."""
    moving_threshold: bool = False
    """Let the short-term loop move the threshold of the adaptive policy."""
    admission: bool = False
    """Refuse at the door what is predicted to miss slo.ttft."""


class LinkTable(_Table):
    """`[link]`: changes to the plan's link."""

    bandwidth: BitsPerSecond | None = None
    """Capacity; the plan's if absent."""
    rtt: Seconds | None = None
    """Round-trip time; the plan's if absent."""
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a segment is lost; limits what one connection carries."""
    connections: Annotated[int, Field(ge=1)] = 8
    """TCP connections of one transfer."""
    overlap: bool = True
    """Ship chunk by chunk while prefill computes."""
    dead_after: Seconds = 5.0
    """Silence after which the link counts as dead."""


class CacheTable(_Table):
    """`[cache]`: prefix caches, one for each cluster."""

    pd_blocks: Count | None = None
    """Limit in the PD cluster, blocks; unlimited if absent, 0 is no cache."""
    prfaas_blocks: Count | None = None
    """Limit in the PrfaaS cluster, blocks."""
    block_tokens: Annotated[int, Field(ge=1)] = 512
    """Tokens of a block."""
    checkpoint_blocks: Count = 0
    """Room of a checkpoint of linear state, blocks; 0 is a model without linear layers."""


class SignalsTable(_Table):
    """`[signals]`: how late the gateway sees queues and link."""

    interval: Seconds = 0.5
    """Between two observations."""
    delay: Seconds = 0.05
    """From an observation to the gateway."""
    stale_after: Seconds = 3.0
    """Age beyond which a signal counts as unknown."""
    loop_interval: Seconds = 5.0
    """Between two moves of the threshold."""


class SloTable(_Table):
    """`[slo]`: targets of one request."""

    ttft: Seconds | None = None
    """Time to first token."""
    tpot: Seconds | None = None
    """Mean time per output token."""


class FailureTable(_Table):
    """`[[failure]]`: something breaks and recovers."""

    kind: FailureKind
    """link, prefill, prfaas or decode."""
    at: Seconds
    """When."""
    duration: Seconds
    """How long."""
    index: Count = 0
    """Which instance; not for the link."""
    capacity: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the link's capacity that is left; 0 is a cut."""
    repeat: Annotated[int, Field(ge=1)] = 1
    """Happens so many times, each `duration` after the end of the last: flapping."""


class ScenarioFile(_Table):
    """A scenario file."""

    title: str
    """What is simulated, for people."""
    plan: str
    """Plan file with model, lengths, clusters and prices, relative to this file."""
    plan_settings: list[str] = []
    """Changes to the plan, as `prfaas plan --set` takes them."""
    seed: Count = 1
    """Seed of arrivals and lengths."""
    workload: WorkloadTable
    """What arrives."""
    routing: RoutingTable = RoutingTable()
    """Who decides."""
    link: LinkTable = LinkTable()
    """Changes to the plan's link."""
    cache: CacheTable = CacheTable(pd_blocks=0, prfaas_blocks=0)
    """Prefix caches; none if absent."""
    signals: SignalsTable = SignalsTable()
    """How late the gateway sees."""
    slo: SloTable = SloTable()
    """Targets."""
    failure: list[FailureTable] = []
    """What breaks."""
