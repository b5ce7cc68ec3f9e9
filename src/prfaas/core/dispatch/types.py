"""Inputs and results of the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from prfaas.core.admission.fair_slots import FairSettings
from prfaas.core.codec.codecs import Quality
from prfaas.core.control.threshold_loop import Evidence, Pressures
from prfaas.core.kv.blocks import Layout
from prfaas.core.market.classes import ServiceClass
from prfaas.core.market.market import Market
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.decision import Decision, Path, RoutingFacts
from prfaas.core.routing.policies import Bandwidth, PolicyName
from prfaas.core.routing.predictions import CostModel
from prfaas.core.transfer.residency import EVERYWHERE, Residency
from prfaas.records import Record
from prfaas.units import BYTES_PER_TB, NS_PER_S

_LOCAL = Path.LOCAL


@dataclass(frozen=True, slots=True)
class ClusterMember:
    """An instance of a cluster."""

    name: str
    """Unique among all clusters."""
    pool: str
    """Place where its blocks are kept; instances of one pool share a prefix cache."""
    within: frozenset[str] = frozenset()
    """Of a PrfaaS instance: the PD instances on whose processor cores it computes. A prefill there
    takes from them what it adds."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The PD cluster."""

    name: str
    prefill: tuple[ClusterMember, ...]
    decode: tuple[ClusterMember, ...] | None = None
    """Instances that only decode; None when those that prefill decode as well."""
    costs: CostModel | None = None
    """Predicts compute; None without profiles."""


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """A PrfaaS cluster."""

    name: str
    instances: tuple[ClusterMember, ...]
    costs: CostModel | None = None
    """Predicts compute and bytes; None without profiles."""
    price_per_tb: float = 0.0
    """Price of 10**12 bytes on its link."""
    link_bits_per_s: float = 0.0
    """Rate of its link by the plan, until one is measured; 0 is unknown."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Settings of routing."""

    policy: PolicyName
    offload_threshold: int
    bandwidth: Bandwidth = Bandwidth.SCARCE
    """Regime of the paper's rule."""
    moving_threshold: bool = False
    """Let the short-term loop move the threshold; only `adaptive` has one that moves."""
    ttft_max_ns: int | None = None
    """Target of the time to first token; None is no target."""
    admission: bool = False
    """Refuse what is predicted to miss the target."""
    fairness: FairSettings = FairSettings()  # noqa: RUF009 (frozen)
    """How tenants share what is admitted under overload."""
    stale_after_ns: int = 3 * NS_PER_S
    """Age beyond which a report counts as unknown."""
    pulls: bool = False
    """Let `adaptive` fetch a prefix from a PrfaaS cluster for a local prefill."""
    second_price: float | None = None
    """What a second of a request's time is worth, in the currency of `price_per_tb`; None makes
    bytes free."""
    calibration: CalibrationSettings = CalibrationSettings()  # noqa: RUF009 (frozen)
    """How predictions are corrected by what is observed."""
    residency: Residency = EVERYWHERE
    """Regions of clusters and tenants."""
    market: Market | None = None
    """Prices of all clusters; None without. `cost` needs it; under other policies it only counts
    what is spent."""
    attention_tokens: int = 0
    """Context at which attention costs a token as much as all else, of the model; weighs prompts
    without a plan. 0 is unknown: tokens alone count."""

    def ns_per_byte(self, price_per_tb: float) -> float:
        """Worth of a byte as time of a request, ns."""
        if self.second_price is None:
            return 0.0
        return price_per_tb / BYTES_PER_TB / self.second_price * NS_PER_S


NOTHING: Mapping[str, int] = MappingProxyType({})


class Arrival(Record, frozen=True):
    """A request that has to be routed, as a gateway knows it: its output length is not among it.

    A driver keeps it while the request is open, without hits, which it looks up for each decision.
    """

    request_id: int
    """Unique among the open requests."""
    num_prompt_tokens: int
    num_tokens_to_fit: int
    """What an instance has to be able to hold, tokens; 0 takes any."""
    hits: Mapping[str, int] = NOTHING
    """Usable cached prefix by pool, tokens, and by instance what it holds in its own memory; who is
    left out holds nothing."""
    hints: Mapping[str, int] = NOTHING
    """The same for pools whose contents are not certain: it draws a request to them, and decides
    nothing else."""
    offloadable: bool = True
    """True if prefill and decode may be split."""
    shippable_tokens: int | None = None
    """Prefix that could be shipped; where decode has as much, nothing is. None is the whole
    prompt."""
    avoid: str = ""
    """Instance that was tried already."""
    tenant: str = ""
    may_ship: bool = True
    """True if its tenant may use the links."""
    layout: Layout | None = None
    """Of its blocks; None while unknown, and then they fit into every pool."""
    streams: bool = True
    """True if its first token is observed; only such requests measure decode."""
    hashes: Sequence[bytes] = ()
    """Hash chain of a single prompt, for who looks cached prefixes up; empty with several."""
    service: ServiceClass | None = None
    """Its class of service; None is that of the deployment."""
    quality: Quality = Quality.LOSSLESS
    """Quality class of its blocks."""


class Routed(Record, frozen=True):
    """Route of a request."""

    decision: Decision
    """The path and why."""
    facts: RoutingFacts
    """What the decision was made from: lengths, and the cached prefix of each path."""
    cluster: str
    prefill: str
    decode: str | None
    """The instance that decodes; None while it is not chosen."""
    source: str
    """Pool that ships the blocks of the remote path, or a prefix that is pulled for the local one;
    "" without either."""
    destination: str
    """Pool that they are decoded from."""
    hit_tokens: int
    """Prefix that prefill does not compute, tokens: cached there, or pulled."""
    shipped_bytes: int
    """What the link from a PrfaaS cluster is promised: the prompt's blocks, or on the local path
    those of a prefix that is pulled; 0 without either, or without a cost model."""
    prefill_pool: str
    prefill_pool_tokens: int
    """Cached prefix in that pool, tokens; a pull leaves it out."""
    pulled_from: str = ""
    """Pool that a prefix is pulled from before prefill; "" without. On the remote path it is of
    another host of the PrfaaS cluster."""

    @property
    def present_tokens(self) -> int:
        """Cached prefix in the pool that it is decoded from, tokens; it is not shipped."""
        return self.facts.present_tokens

    @property
    def num_tokens_to_prefill(self) -> int:
        """Tokens that prefill computes."""
        return self.facts.num_prompt_tokens - self.hit_tokens

    @property
    def pulls(self) -> bool:
        """Return True if it is prefilled locally with a pulled prefix."""
        return self.decision.path is _LOCAL and bool(self.pulled_from)

    @property
    def pulls_from_host(self) -> bool:
        """Return True if a prefix is pulled from another host of the cluster that prefills."""
        return bool(self.pulled_from) and not self.decision.pull_tokens

    @property
    def own_tokens(self) -> int:
        """Prefix that prefill resumes after without the pull, tokens."""
        return self.prefill_pool_tokens if self.pulls_from_host else self.facts.pd_hit_tokens

    @property
    def pull_link(self) -> tuple[str, str]:
        """Ends of the link from `pulled_from`."""
        return self.pulled_from, self.prefill_pool

    @property
    def ships(self) -> bool:
        """Return True if prefill hands its blocks over to another pool."""
        return self.prefill_pool != self.destination

    @property
    def changes_host(self) -> bool:
        """Return True if the local path hands blocks from one host of the PD cluster to another."""
        return self.decision.path is _LOCAL and self.ships


class RefusalReason(StrEnum):
    """Reason of a refusal; bounded, so that it can label a metric."""

    PREDICTED_LATE = "predicted_late"
    NO_INSTANCE = "no_instance"
    """No instance of the PD cluster is available."""


class RefusedRequest(Record, frozen=True):
    """A refused request."""

    reason: RefusalReason
    retry_after_s: int
    """Time when it is worth another try, whole seconds, at least 1."""
    decision: Decision
    """Place where it would have gone."""


@dataclass(frozen=True, slots=True)
class ThresholdMoved:
    """The threshold of the link between two pools was moved: by the short-term loop, or to what
    recent requests ask for."""

    source: str
    destination: str
    before: int
    """Threshold before, tokens."""
    offload_threshold: int
    """Threshold from here on, tokens."""
    pressures: Pressures | None = None
    """What the short-term loop saw; None if it was not that."""
    evidence: Evidence | None = None
    """What recent requests ask for; None if it was not that."""
