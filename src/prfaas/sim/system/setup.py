"""Setup of a run, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas.core.cache.tenant_shares import Share
from prfaas.core.codec.gain import BlockCoding
from prfaas.core.control.replication import CopySettings
from prfaas.core.control.role_loop import RoleSettings
from prfaas.core.control.split import Plans
from prfaas.core.dispatch.links import SITE_BITS_PER_S
from prfaas.core.routing.policies import Bandwidth, PolicyName
from prfaas.core.routing.predictions import Costs
from prfaas.core.transfer.residency import EVERYWHERE, Residency
from prfaas.market.make import MarketPlan
from prfaas.planner.hardware.profiles import StepTime
from prfaas.units import NS_PER_S


class FailureKind(StrEnum):
    """Kinds of failures."""

    LINK = "link"
    PREFILL = "prefill"
    """An instance of the PD cluster that prefills."""
    PRFAAS = "prfaas"
    """An instance of the PrfaaS cluster."""
    DECODE = "decode"
    POOL = "pool"
    """The pool of a host of a cluster: its cache, and its links."""
    STALL = "stall"
    """An instance that prefills takes requests and ends none; nothing else tells."""
    FREEZE = "freeze"
    """An instance that decodes stops, and its connections stay open; health checks miss it."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of one instance."""

    batch_max: int
    """Sequences that run at once."""
    kv_capacity_bytes: int | None = None
    """KV cache; None when it never binds."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Something breaks at an instant and recovers later."""

    kind: FailureKind
    at_ns: int
    for_ns: int
    index: int = 0
    """Number of the instance, or of a pool's host; ignored for link."""
    capacity_ratio: float = 0.0
    """Rest of the link's capacity; 0 is a cut."""
    cluster: str = ""
    """Whose: a PrfaaS cluster's link and instances, or any cluster's pool, or instance that stalls.
    Empty is the first PrfaaS cluster."""
    keeps_disk: bool = False
    """Of a pool: what lay on disk is there again afterwards."""
    rebuild_ns: int = 0
    """Of a pool: from its recovery until the gateway knows what it holds."""


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """The link between a PrfaaS cluster and the PD cluster."""

    bits_per_s: float
    """Capacity of each direction."""
    rtt_ns: int = 0
    flow_bits_per_s: float = float("inf")
    """Most that one transfer gets; loss decides it."""
    dead_after_ns: int = 5 * NS_PER_S
    """Silence after which both ends take the link for dead."""
    price_per_tb: float = 0.0
    """Price of 10**12 bytes."""
    planned_bits_per_s: float | None = None
    """Rate that the gateway expects until one is measured; None is what the link carries."""
    planned_bytes_ratio: float = 1.0
    """Bytes of a prompt in the gateway's plan by those that it ships."""
    coding: BlockCoding | None = None
    """Coding of blocks; None sends all raw."""


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """The prefix caches of a cluster; None is unlimited, 0 is none."""

    host_blocks: int | None = 0
    """Limit of its pools together in host memory, blocks."""
    disk_blocks: int | None = 0
    """Limit of its pools together on disk, blocks."""
    disk_bits_per_s: float = float("inf")
    """Rate at which one prefill reads from disk."""
    device_blocks: int | None = 0
    """Limit of each instance that prefills in its own memory, blocks."""
    shares: Mapping[str, Share] = field(default_factory=dict)
    """Of tenants in its pool."""


@dataclass(frozen=True, slots=True)
class BlockSetup:
    """Units of all caches."""

    tokens: int = 512
    checkpoint_blocks: int = 0
    """Size of a checkpoint of linear state, in blocks; 0 is a model without."""


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """A PrfaaS cluster."""

    name: str
    num_instances: int
    costs: Costs
    link: LinkSetup
    """To the PD cluster; all hosts share it."""
    cache: CacheSetup = CacheSetup()
    """Of its pools and instances."""
    num_hosts: int = 1
    """Each has one pool and every `num_hosts`-th instance."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of its pools, one a host."""
        return _pools(self.name, self.num_hosts)


@dataclass(frozen=True, slots=True)
class PlacementSetup:
    """Placement of cached prefixes."""

    pulls: bool = False
    """Let `adaptive` fetch a prefix from another cluster when that is predicted to be faster than
    computing it."""
    copies: CopySettings | None = None
    """How hot prefixes are copied; None leaves them where they are."""
    second_price: float | None = None
    """What a second of a request's time is worth, in the plan's currency; None makes bytes free in
    decisions."""


@dataclass(frozen=True, slots=True)
class SignalSetup:
    """Settings of the gateway's signals."""

    interval_ns: int = NS_PER_S // 2
    delay_ns: int = NS_PER_S // 20
    """From an observation to the gateway."""
    stale_after_ns: int = 3 * NS_PER_S
    """Age beyond which a signal counts as unknown."""
    loop_interval_ns: int = 5 * NS_PER_S
    """Between two moves of the threshold."""
    gone_after_ns: int = NS_PER_S // 2
    """From the death of an instance to the health check that finds it, unless a request does: half
    of the interval."""
    frozen_after_ns: int = 13 * NS_PER_S // 2
    """The same for an instance that freezes: the third check without an answer."""
    layouts: bool = True
    """Engines report the layout of their blocks before the first transfer."""


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """Settings of routing."""

    policy: PolicyName
    offload_threshold: int
    bandwidth: Bandwidth = Bandwidth.SCARCE
    """Regime of the paper's rule."""
    moving_threshold: bool = False
    """Run the short-term loop; only `adaptive` uses it."""
    admission: bool = False
    """Refuse what is predicted to miss the TTFT target."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Share of each tenant under overload; 1 if absent."""
    residency: Residency = EVERYWHERE
    """Regions of clusters and tenants."""
    planned_ratios: tuple[float, float] = (1.0, 1.0)
    """Times of prefills on PD and on PrfaaS instances in the gateway's profiles, by those that they
    take."""
    prefill_timeout_ns: int | None = None
    """From the start of a prefill leg to its answer, at most; None is no limit."""
    transfer_timeout_ns: int | None = None
    """Longest that an engine waits for blocks in transit; None is no limit."""
    early_first_token: bool = False
    """The engine that prefills gives the first token."""
    relay_decode: bool = False
    """It goes on until its blocks have arrived."""


@dataclass(frozen=True, slots=True)
class RolesSetup:
    """Settings of role changes."""

    settings: RoleSettings
    """Limits of the long-term loop."""
    plans: Plans | None = None
    """The planner's answers for splits; None without."""


@dataclass(frozen=True, slots=True)
class SloSetup:
    """Targets of one request; None is no target. TTFT in ns, TPOT in ns."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The system that is simulated."""

    prfaas: tuple[ClusterSetup, ...]
    num_prefill: int
    num_decode: int
    costs: Costs
    """Times and bytes of the PD cluster."""
    step_ns: StepTime
    decode: DecodeLimits
    routing: RoutingSetup
    name: str = "pd"
    """Of the PD cluster."""
    cache: CacheSetup = CacheSetup()
    """Of the PD cluster's pools and instances."""
    num_hosts: int = 1
    """Of the PD cluster; as in `ClusterSetup`."""
    host_link: LinkSetup = LinkSetup(SITE_BITS_PER_S)
    """Link between two hosts of a cluster, one for each pair and direction."""
    blocks: BlockSetup = BlockSetup()
    placement: PlacementSetup = PlacementSetup()
    signals: SignalSetup = SignalSetup()
    slo: SloSetup = SloSetup()
    failures: tuple[Failure, ...] = ()
    price_per_h: float = 0.0
    """Price of all GPUs for one hour."""
    roles: RolesSetup | None = None
    """How PD instances change their roles; None keeps them."""
    market: MarketPlan | None = None
    """Prices and revocations; None without."""

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the PD cluster's pools, one a host."""
        return _pools(self.name, self.num_hosts)

    @property
    def pools_of(self) -> dict[str, tuple[str, ...]]:
        """Names of the pools of each cluster."""
        return {self.name: self.pools, **{each.name: each.pools for each in self.prfaas}}


def _pools(cluster: str, num_hosts: int) -> tuple[str, ...]:
    """The pool of a single host has the name of its cluster."""
    return (cluster,) if num_hosts == 1 else tuple(f"{cluster}-{i}" for i in range(num_hosts))
