"""The scenario file: tables and units of a TOML file that describes a simulated run.

Clusters, profiles, model, lengths and prices come from a plan file, which the planner reads too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prfaas.config.governance.scenario_regions import ResidencyTable
from prfaas.config.market.prices import PriceTable
from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.codec.gain import BlockCoding, CodecSpeed, PlannedCoding
from prfaas.core.dispatch.links import SITE_BITS_PER_S
from prfaas.core.market.market import HYSTERESIS
from prfaas.core.request.fleet import PREFILL_TIMEOUT_NS
from prfaas.core.routing.policies import Bandwidth as Regime
from prfaas.core.routing.policies import PolicyName
from prfaas.core.transfer.pacing import CONNECTIONS_MAX
from prfaas.core.transfer.tcp_goodput import CongestionControl
from prfaas.errors import ConfigError
from prfaas.market.scenario import RevocationTable
from prfaas.planner.answer.plan_file import (
    Bandwidth,
    Delay,
    Interval,
    Positive,
    Seconds,
    SizeBytes,
    Span,
    Target,
)
from prfaas.planner.model.kv_geometry import KvGeometry
from prfaas.sim.system.setup import FailureKind
from prfaas.sim.workloads.make import WorkloadTable
from prfaas.toml_tables import refuse_unused
from prfaas.units import BITS_PER_BYTE, NS_PER_S


class CodingTable(BaseModel):
    """Keys of `[link]` about coding and lanes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    codec: LinkCodec | None = None
    """Coding of blocks without loss: raw, auto where it raises the rate of the link, or always; the
    plan's if absent, as the following. raw rounds nothing either."""
    codec_rate: Bandwidth | None = None
    """Blocks that one core codes, and that one decodes."""
    codec_cores: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Cores that code at each end; as many as lanes if only those are given."""
    quality: Quality | None = None
    """Quality class of the blocks of all tenants that qualities does not name."""
    qualities: dict[str, Quality] = {}
    """Quality class by tenant of the workload; a class of service is a tenant here."""
    quality_rate: Bandwidth | None = None
    """Blocks that one core rounds."""
    lanes: Annotated[int, Field(ge=1)] | None = None
    """I/O lanes at each end, of all pool nodes together."""
    lane_rate: Bandwidth | None = None
    """Rate at which one lane sends or receives, encryption included."""

    def coding(self, plan: PlannedCoding, geometry: KvGeometry) -> BlockCoding | None:
        """Return the coding of a simulated link; None if it sends all raw at any rate; ConfigError
        if blocks would have to be rounded on a link that is raw."""
        codec, lane, rounding = (
            rate / BITS_PER_BYTE if rate is not None else None
            for rate in (self.codec_rate, self.lane_rate, self.quality_rate)
        )
        found = replace(
            plan,
            mode=self.codec or plan.mode,
            cores=self.codec_cores or self.lanes or plan.cores,
            speed=plan.speed if codec is None else CodecSpeed(codec, codec),
            quality=self.quality or plan.quality,
            lanes=self.lanes or plan.lanes,
            lane_bytes_per_s=lane or plan.lane_bytes_per_s,
            rounding_bytes_per_s=rounding or plan.rounding_bytes_per_s,
        )
        every = [found.quality, *self.qualities.values()]
        if found.mode is LinkCodec.RAW and any(quality.is_lossy for quality in every):
            raise ConfigError(
                'link.quality: a link with codec = "raw" rounds nothing; set link.codec to "auto"'
            )
        if found.is_raw:
            return None
        return BlockCoding(found, geometry.kv_dtype, geometry.state_dtype, self.qualities)


Count = Annotated[int, Field(ge=0, le=2**48)]
Ratio = Annotated[float, Field(ge=0, le=1)]
HOSTS_MAX = 64
_TICKS_MAX = 5_000_000
"""Hosts of a cluster: links between them are as many as hosts squared."""


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ScenarioRoutingTable(_Table):
    """`[routing]`: who decides, and on what instances."""

    policy: PolicyName = PolicyName.ADAPTIVE
    """local, remote, paper, observed, adaptive or cost."""
    threshold: Count | None = None
    """Offload threshold, tokens; the planner's optimum if absent."""
    prefill_instances: Count | None = None
    """PD instances that prefill; the planner's optimum if absent."""
    moving_threshold: bool = False
    """Enable the short-term loop, which adjusts the threshold of the adaptive policy."""
    weights: dict[str, Annotated[float, Field(ge=1e-6, le=1e6)]] = {}
    """With admission: share of each tenant of `workload.tenants` under overload; 1 if absent."""
    reroling: bool = False
    """Enable the long-term loop, which moves PD instances between prefill and decode and plans the
    threshold; not with failures of PD instances."""
    dwell: Interval = 300.0
    """Minimum time between two changes of roles; the loop's other times are proportional."""
    conversion: Delay = 1.0
    """Time of a change of roles of an instance, in addition to draining."""
    planned_local_ratio: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """Time of a prefill on a PD instance in the gateway's profile, by the time that it takes: 0.5
    is a profile that is wrong by that."""
    planned_remote_ratio: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """The same on PrfaaS instances."""
    admission: bool | None = None
    """Refuse requests that are predicted to miss slo.ttft; if absent, on with slo.ttft."""
    prefill_timeout: Span = PREFILL_TIMEOUT_NS / NS_PER_S
    """Maximum time from sending a prefill to its answer; later the prompt is prefilled where that
    is soonest. A queue that moves is waited for if nothing else is sooner."""
    transfer_timeout: Span | None = None
    """Maximum time that an instance waits for blocks in transit; later it computes them. No limit
    if absent; the gateway's default is 10 s."""
    early_first_token: Literal["auto", "off"] = "off"  # noqa: S105 (no password)
    """The instance that prefills gives the first token, as by default in a gateway: auto, or off as
    in the paper."""
    relay_decode: Literal["auto", "off"] = "off"
    """With it, that instance goes on until its blocks have come: auto or off."""
    bandwidth: Regime = Regime.SCARCE
    """Regime of the paper's rule: scarce, or abundant, which pulls the longer prefix."""


class HostsTable(_Table):
    """`[hosts]`: hosts of the clusters; each has one pool and an equal part of the instances."""

    pd: Annotated[int, Field(ge=1, le=HOSTS_MAX)] = 1
    """Hosts of the PD cluster."""
    prfaas: Annotated[int, Field(ge=1, le=HOSTS_MAX)] = 1
    """Hosts of each PrfaaS cluster."""
    bandwidth: Bandwidth = SITE_BITS_PER_S
    """Capacity between two hosts of a cluster, each pair and direction."""
    rtt: Delay = 0.0002
    """Round-trip time between two hosts of a cluster."""


class ScenarioLinkTable(CodingTable):
    """`[link]`: changes to the plan's links, to all of them."""

    bandwidth: Bandwidth | None = None
    """Bandwidth without loss; the plan's if absent."""
    planned_bytes_ratio: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """Bytes of a prompt that the gateway's plan has, by those that it ships: 100 is a plan that is
    wrong by that."""
    rtt: Delay | None = None
    """Round-trip time; the plan's if absent."""
    loss: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of segments that are lost at random; the plan's if absent. Limits with the round trip
    what TCP carries over the link (`core/transfer/tcp_goodput.py`)."""
    congestion_control: CongestionControl | None = None
    """bbr, or cubic on hosts that do not allow it; the plan's if absent."""
    connections: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] | None = None
    """Data connections of a pool node; the plan's if absent."""
    pool_nodes: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Pool nodes that send over a link in parallel, at least `hosts.prfaas`; a transfer uses one.
    The plan's if absent."""
    overlap: bool = True
    """Ship chunk by chunk while prefill computes."""
    dead_after: Span = 5.0
    """Silence after which the link counts as dead."""


class CacheTable(_Table):
    """`[cache]`: prefix caches, one for each host and, if wanted, one for each instance."""

    pd_blocks: Count | None = None
    """Host memory of the PD cluster, blocks; unlimited if absent, 0 is no cache. Its hosts have
    equal parts."""
    prfaas_blocks: Count | None = None
    """The same of each PrfaaS cluster."""
    pd_disk_blocks: Count = 0
    """Disk of the PD cluster, blocks: blocks evicted from host memory go there."""
    prfaas_disk_blocks: Count = 0
    """The same of each PrfaaS cluster."""
    pd_device_blocks: Count = 0
    """Device memory of each PD prefill instance, blocks; routing knows its contents, as from KV
    events. 0 is none."""
    prfaas_device_blocks: Count = 0
    """The same of each PrfaaS instance."""
    disk_bandwidth: Bandwidth = 50e9
    """Bandwidth of reads from disk for one prefill."""
    shares: dict[str, tuple[Ratio, Ratio]] = {}
    """Reserve and limit of tenants in host memory and on disk, each from 0 to 1."""
    block_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Tokens of a block."""
    checkpoint_blocks: Count = 0
    """Size of a checkpoint of linear state, blocks; 0 is a model without linear layers."""
    state_checkpoint_tokens: Count = 0
    """Distance, tokens, of the states that a hand-off ships beside the last one; 0 ships none."""


class PlacementTable(_Table):
    """`[placement]`: where cached prefixes lie."""

    pull: bool = False
    """Let adaptive fetch a prefix from another cluster if that is predicted to be faster."""
    copy_budget: SizeBytes = 0
    """Hot prefixes that the PD cluster misses are copied to it, up to this number of bytes of each
    link in each signals.loop_interval; 0 copies nothing."""
    half_life: Span = 60.0
    """Time in which the count of a prefix halves."""
    second_price: Positive | None = None
    """Value of a second of a request's time, in the plan's currency, compared with the price of
    bytes; if absent, bytes are free in decisions, and "cost" counts no time."""
    price_hysteresis: Annotated[float, Field(ge=0, lt=1)] = HYSTERESIS
    """As in a deployment file, for "cost"."""


class SignalsTable(_Table):
    """`[signals]`: how late the gateway sees queues and link."""

    interval: Interval = 0.5
    """Interval of observations."""
    delay: Delay = 0.05
    """Delay of an observation to the gateway."""
    stale_after: Span = 3.0
    """Age beyond which a signal counts as unknown."""
    loop_interval: Interval = 5.0
    """Interval of changes of the threshold."""
    layouts: bool = True
    """Engines report the bytes of their blocks, which correct those of the plan before the first
    transfer."""


class ScenarioSloTable(_Table):
    """`[slo]`: targets of one request."""

    ttft: Target | None = None
    """Time to first token."""
    tpot: Target | None = None
    """Mean time per output token."""


_OF_FAILURE: dict[str, list[FailureKind]] = {
    "index": [kind for kind in FailureKind if kind is not FailureKind.LINK],
    "capacity": [FailureKind.LINK],
    "keep_disk": [FailureKind.POOL],
    "rebuild": [FailureKind.POOL],
}
"""Kinds of failures that a key is for; all kinds where it is left out."""


class FailureTable(_Table):
    """`[[failure]]`: something breaks and recovers."""

    kind: FailureKind
    """link, prefill, prfaas, decode, pool, stall: an instance that prefills accepts requests and
    completes none, without any other sign, or freeze: an instance that decodes stops, and answers
    neither health checks nor requests for its metrics."""
    at: Annotated[Seconds, Field(ge=0, le=1e7)]
    """Start of the failure."""
    duration: Span
    """Duration of the failure."""
    index: Count = 0
    """Index of the instance, or of the host of a pool; not for link."""
    cluster: str = ""
    """Cluster of the link, PrfaaS instance, pool or stalled instance, by its name in the plan; the
    first PrfaaS cluster if absent."""
    capacity: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the link's capacity that is left; 0 is a cut."""
    keep_disk: bool = False
    """The disk of a pool keeps its blocks; host memory is always lost."""
    rebuild: Delay = 0.0
    """Time from a pool's recovery until the gateway knows its contents."""
    repeat: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of repetitions, each `duration` after the end of the last: flapping."""

    @model_validator(mode="after")
    def _applies(self) -> FailureTable:
        refuse_unused(self, "kind", _OF_FAILURE)
        return self


class ScenarioFile(_Table):
    """A scenario file."""

    title: str
    """Title of the output."""
    plan: str
    """Plan file with model, lengths, clusters and prices, relative to this file."""
    plan_settings: list[str] = []
    """Changes to the plan, as `prfaas plan --set` takes them."""
    seed: Count = 1
    """Seed of arrivals and lengths."""
    workload: WorkloadTable
    """The workload."""
    routing: ScenarioRoutingTable = ScenarioRoutingTable()
    """Routing."""
    residency: ResidencyTable = ResidencyTable()
    """Regions of clusters and tenants."""
    hosts: HostsTable = HostsTable()
    """Hosts of the clusters; one each if absent."""
    link: ScenarioLinkTable = ScenarioLinkTable()
    """Changes to the plan's link."""
    cache: CacheTable = CacheTable(pd_blocks=0, prfaas_blocks=0)
    """Prefix caches; none if absent."""
    placement: PlacementTable = PlacementTable()
    """Placement of cached prefixes."""
    signals: SignalsTable = SignalsTable()
    """Delays of the gateway's signals."""
    slo: ScenarioSloTable = ScenarioSloTable()
    """Targets."""
    prices: dict[str, PriceTable] = {}
    """Prices by cluster, as in a deployment file; the plan's if absent. A run starts at
    midnight."""
    revocation: list[RevocationTable] = []
    """Capacity that leaves."""
    failure: list[FailureTable] = []
    """Failures."""

    @model_validator(mode="after")
    def _ends(self) -> ScenarioFile:
        synthetic = self.workload.arrivals not in ("trace", "azure")
        for name in ("interval", "loop_interval"):
            count = self.workload.duration / getattr(self.signals, name) if synthetic else 0
            if count > _TICKS_MAX:
                raise ValueError(
                    f"signals.{name} makes {count:,.0f} observations in workload.duration, at most "
                    f"{_TICKS_MAX:,} are simulated; raise it"
                )
        return self
