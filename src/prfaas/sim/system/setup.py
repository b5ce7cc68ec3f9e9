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
    """Limits of one instance.

    Attributes:
        batch_max: Sequences that run at once.
        kv_capacity_bytes: KV cache; None when it never binds.
    """

    batch_max: int
    kv_capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Something breaks at an instant and recovers later.

    Attributes:
        index: Which instance, or for a pool which host; ignored for link.
        capacity_ratio: What is left of the link's capacity; 0 is a cut.
        cluster: Whose: a PrfaaS cluster's link and instances, or any cluster's pool, or instance
            that stalls. Empty is the first PrfaaS cluster.
        keeps_disk: Of a pool: what lay on disk is there again afterwards.
        rebuild_ns: Of a pool: from its recovery until the gateway knows what it holds.
    """

    kind: FailureKind
    at_ns: int
    for_ns: int
    index: int = 0
    capacity_ratio: float = 0.0
    cluster: str = ""
    keeps_disk: bool = False
    rebuild_ns: int = 0


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """The link between a PrfaaS cluster and the PD cluster.

    Attributes:
        bits_per_s: Capacity of each direction.
        flow_bits_per_s: What one transfer gets at most; loss decides it.
        dead_after_ns: Silence after which both ends take the link for dead.
        price_per_tb: Price of 10**12 bytes.
        planned_bits_per_s: Rate that the gateway expects until one is measured; None is what the
            link carries.
        planned_bytes_ratio: Bytes of a prompt in the gateway's plan by those that it ships.
        coding: How blocks are coded; None sends all raw.
    """

    bits_per_s: float
    rtt_ns: int = 0
    flow_bits_per_s: float = float("inf")
    dead_after_ns: int = 5 * NS_PER_S
    price_per_tb: float = 0.0
    planned_bits_per_s: float | None = None
    planned_bytes_ratio: float = 1.0
    coding: BlockCoding | None = None


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """The prefix caches of a cluster; None is unlimited, 0 is none.

    Attributes:
        host_blocks: Limit of its pools together in host memory, blocks.
        disk_blocks: Limit of its pools together on disk, blocks.
        disk_bits_per_s: What reading from disk gives one prefill.
        device_blocks: Limit of each instance that prefills in its own memory, blocks.
        shares: Of tenants in its pool.
    """

    host_blocks: int | None = 0
    disk_blocks: int | None = 0
    disk_bits_per_s: float = float("inf")
    device_blocks: int | None = 0
    shares: Mapping[str, Share] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockSetup:
    """Units of all caches.

    Attributes:
        checkpoint_blocks: Size of a checkpoint of linear state, in blocks; 0 is a model without.
    """

    tokens: int = 512
    checkpoint_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """A PrfaaS cluster.

    Attributes:
        link: To the PD cluster; all hosts share it.
        cache: Of its pools and instances.
        num_hosts: Each has one pool and every `num_hosts`-th instance.
    """

    name: str
    num_instances: int
    costs: Costs
    link: LinkSetup
    cache: CacheSetup = CacheSetup()
    num_hosts: int = 1

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of its pools, one a host."""
        return _pools(self.name, self.num_hosts)


@dataclass(frozen=True, slots=True)
class PlacementSetup:
    """Placement of cached prefixes.

    Attributes:
        pulls: Let `adaptive` fetch a prefix from another cluster when that is predicted to be
            faster than computing it.
        copies: How hot prefixes are copied; None leaves them where they are.
        second_price: What a second of a request's time is worth, in the plan's currency; None
            makes bytes free in decisions.
    """

    pulls: bool = False
    copies: CopySettings | None = None
    second_price: float | None = None


@dataclass(frozen=True, slots=True)
class SignalSetup:
    """Settings of the gateway's signals.

    Attributes:
        delay_ns: From an observation to the gateway.
        stale_after_ns: Age beyond which a signal counts as unknown.
        loop_interval_ns: Between two moves of the threshold.
        gone_after_ns: From the death of an instance to the health check that finds it, unless a
            request does: half of the interval.
        frozen_after_ns: The same for an instance that freezes: the third check without an answer.
        layouts: Engines report the layout of their blocks before the first transfer.
    """

    interval_ns: int = NS_PER_S // 2
    delay_ns: int = NS_PER_S // 20
    stale_after_ns: int = 3 * NS_PER_S
    loop_interval_ns: int = 5 * NS_PER_S
    gone_after_ns: int = NS_PER_S // 2
    frozen_after_ns: int = 13 * NS_PER_S // 2
    layouts: bool = True


@dataclass(frozen=True, slots=True)
class RoutingSetup:
    """Settings of routing.

    Attributes:
        bandwidth: Regime of the paper's rule.
        moving_threshold: Run the short-term loop; only `adaptive` uses it.
        admission: Refuse what is predicted to miss the TTFT target.
        weights: Share of each tenant under overload; 1 if absent.
        residency: Regions of clusters and tenants.
        planned_ratios: Times of prefills on PD and on PrfaaS instances in the gateway's profiles,
            by those that they take.
        prefill_timeout_ns: From the start of a prefill leg to its answer, at most; None is no
            limit.
        transfer_timeout_ns: Longest that an engine waits for blocks in transit; None is no limit.
        early_first_token: The engine that prefills gives the first token.
        relay_decode: It goes on until its blocks have arrived.
    """

    policy: PolicyName
    offload_threshold: int
    bandwidth: Bandwidth = Bandwidth.SCARCE
    moving_threshold: bool = False
    admission: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)
    residency: Residency = EVERYWHERE
    planned_ratios: tuple[float, float] = (1.0, 1.0)
    prefill_timeout_ns: int | None = None
    transfer_timeout_ns: int | None = None
    early_first_token: bool = False
    relay_decode: bool = False


@dataclass(frozen=True, slots=True)
class RolesSetup:
    """Settings of role changes.

    Attributes:
        settings: Limits of the long-term loop.
        plans: The planner's answers for splits; None without.
    """

    settings: RoleSettings
    plans: Plans | None = None


@dataclass(frozen=True, slots=True)
class SloSetup:
    """Targets of one request; None is no target. TTFT in ns, TPOT in ns."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The system that is simulated.

    Attributes:
        name: Of the PD cluster.
        costs: Times and bytes of the PD cluster.
        cache: Of the PD cluster's pools and instances.
        num_hosts: Of the PD cluster; as in `ClusterSetup`.
        host_link: Link between two hosts of a cluster, one for each pair and direction.
        price_per_h: Price of all GPUs for one hour.
        roles: How PD instances change their roles; None keeps them.
        market: Prices and revocations; None without.
    """

    prfaas: tuple[ClusterSetup, ...]
    num_prefill: int
    num_decode: int
    costs: Costs
    step_ns: StepTime
    decode: DecodeLimits
    routing: RoutingSetup
    name: str = "pd"
    cache: CacheSetup = CacheSetup()
    num_hosts: int = 1
    host_link: LinkSetup = LinkSetup(SITE_BITS_PER_S)
    blocks: BlockSetup = BlockSetup()
    placement: PlacementSetup = PlacementSetup()
    signals: SignalSetup = SignalSetup()
    slo: SloSetup = SloSetup()
    failures: tuple[Failure, ...] = ()
    price_per_h: float = 0.0
    roles: RolesSetup | None = None
    market: MarketPlan | None = None

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
