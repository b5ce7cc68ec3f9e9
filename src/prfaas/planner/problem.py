"""The planner's question: model, workload, clusters, links, prices. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from prfaas.core.codec.gain import RAW_LINK, PlannedCodedLink, PlannedCoding
from prfaas.core.transfer.link_goodput import BITS_PER_BYTE
from prfaas.core.transfer.tcp_goodput import TcpEnds, TcpPath, goodput_bits_per_s
from prfaas.errors import ConfigError
from prfaas.planner.hardware.profiles import DecodeProfile, PrefillProfile
from prfaas.planner.model.kv_geometry import FloatArray, KvGeometry
from prfaas.planner.workload import LengthDistribution, mean_length

HOST_GPUS = 8
"""GPUs of a host; each host of a PrfaaS cluster runs a pool node, unless the number is given."""
SEARCH_POINTS_MAX = 1_000_000  # about 250 MB of arrays


@dataclass(frozen=True)
class Workload:
    """The traffic."""

    lengths: LengthDistribution
    """Incremental (uncached) prompt length."""
    mean_prompt_tokens: float
    """Mean whole prompt, cached prefix included."""
    output_tokens: float
    """Mean output length, above 0."""
    arrival_cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals; 1 is Poisson."""

    def prefill_s(self, profile: PrefillProfile, num_new_tokens: FloatArray) -> FloatArray:
        """Mean prefill time by incremental length, after the cached prefixes of such requests, s.

        Args:
            num_new_tokens: Incremental lengths, any shape.
        """
        return profile.after(self.lengths.prefix(num_new_tokens), num_new_tokens)

    @property
    def mean_context(self) -> float:
        """Mean context of a running decode: the prompt and half of the output, tokens."""
        return self.mean_prompt_tokens + self.output_tokens / 2

    def with_lengths_scaled(self, factor: float) -> Workload:
        """Every prompt `factor` times as long."""
        return replace(
            self,
            lengths=self.lengths.scaled(factor),
            mean_prompt_tokens=self.mean_prompt_tokens * factor,
        )

    def with_more_hits(self, ratio: float) -> Workload:
        """A share `ratio` of the tokens that now miss the prefix cache hits it."""
        return replace(self, lengths=self.lengths.with_more_hits(ratio))


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """The path between a PrfaaS cluster and the PD cluster."""

    bits_per_s: float
    """Bandwidth that transfers can use without loss, above 0."""
    rtt_s: float = 0.0
    """Round-trip time, s."""
    price_per_tb: float = 0.0
    """Price of moving 10**12 bytes."""
    coding: PlannedCoding = RAW_LINK
    """Coding of blocks by the pool nodes at both ends."""
    loss: float = 0.0
    """Share of segments that the path loses at random, in [0, 1)."""
    transport: TcpEnds | None = None
    """Both ends, which decide with round trip and loss what TCP carries of the bandwidth; its
    `num_nodes` 0 is one pool node for each host of the cluster. None: the bandwidth is what the
    link was measured to carry."""

    @property
    def path(self) -> TcpPath:
        """Bandwidth, round trip and loss."""
        return TcpPath(self.bits_per_s, self.rtt_s, self.loss)

    def measured(self, bits_per_s: float) -> PlannedLink:
        """The link if transfers were measured to have this rate, bit/s."""
        return replace(self, bits_per_s=max(bits_per_s, 1.0), transport=None)


@dataclass(frozen=True)
class PrfaasCluster:
    """A prefill-only cluster behind a link."""

    name: str
    num_instances: int
    """Prefill instances, 0 or more."""
    gpus_per_instance: int
    prefill: PrefillProfile
    """T_prefill of one instance."""
    link: PlannedLink
    """Path to the PD cluster."""
    price_per_gpu_h: float = 1.0
    """Price of one GPU for one hour, in any unit that all clusters share."""

    @property
    def num_hosts(self) -> int:
        """Hosts, at least 1."""
        return max(1, -(-self.num_instances * self.gpus_per_instance // HOST_GPUS))

    @cached_property
    def transport(self) -> TcpEnds | None:
        """Both ends of the link, with the number of pool nodes; None if its rate was measured."""
        ends = self.link.transport
        return None if ends is None else replace(ends, num_nodes=ends.num_nodes or self.num_hosts)

    @cached_property
    def goodput_bits_per_s(self) -> float:
        """Rate of all transfers on the link together, before coding."""
        if self.transport is None:
            return self.link.bits_per_s
        return max(goodput_bits_per_s(self.link.path, self.transport), 1.0)

    @cached_property
    def transfer_bits_per_s(self) -> float:
        """Rate of one transfer alone on the network: it is sent by one pool node."""
        if self.transport is None:
            return self.wire_bits_per_s
        alone = goodput_bits_per_s(self.link.path, self.transport.alone)
        return min(max(alone, 1.0), self.wire_bits_per_s)

    @cached_property
    def coded(self) -> PlannedCodedLink:
        """The link while it is busy."""
        return self.link.coding.of(self.goodput_bits_per_s / BITS_PER_BYTE)

    @property
    def wire_bits_per_s(self) -> float:
        """Rate of the network; less than the goodput where the codec is the limit."""
        return self.coded.wire_bytes_per_s * BITS_PER_BYTE

    @property
    def price_per_h(self) -> float:
        """Price of the cluster for one hour, without its link."""
        return self.num_instances * self.gpus_per_instance * self.price_per_gpu_h


@dataclass(frozen=True)
class PdCluster:
    """The local cluster, whose instances prefill or decode."""

    name: str
    num_instances: int
    """Instances to be split, at least 1."""
    gpus_per_instance: int
    prefill: PrefillProfile
    """T_prefill of one instance."""
    decode: DecodeProfile
    """Decode step time of one instance."""
    tpot_max_s: float | None = None
    """Target for the time per output token, s; None takes the largest batch."""
    kv_capacity_bytes: float | None = None
    """KV cache of one decode instance; None means it never binds."""
    price_per_gpu_h: float = 1.0
    """Price of one GPU for one hour."""

    @property
    def price_per_instance_h(self) -> float:
        """Price of one instance for one hour."""
        return self.gpus_per_instance * self.price_per_gpu_h


@dataclass(frozen=True)
class Problem:
    """One question to the planner; ConfigError if a setting is impossible."""

    title: str
    geometry: KvGeometry
    """KV cache of the model."""
    workload: Workload
    prfaas: tuple[PrfaasCluster, ...]
    """PrfaaS clusters, each with its link."""
    pd: PdCluster
    step_tokens: int = 100
    """Distance between thresholds that the search tries, tokens."""
    threshold: float | None = None
    """The only threshold to try, tokens; None searches."""
    num_prefill: int | None = None
    """The only N_p to try for PrfaaS-PD, below `pd.num_instances`; None searches."""
    ttft_p90_s: float | None = None
    """Target for the P90 of the time to first token with queueing, s; None is no target."""
    chunk_tokens: int = 8192
    """Prefill chunk, tokens, for overlapped transfers."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_links()
        lengths = self.workload.lengths
        for profile in self.prefill_profiles:
            profile.require(lengths.low, lengths.whole_high)

    def _check_counts(self) -> None:
        if self.pd.num_instances < 1:
            raise ConfigError(
                f"pd.instances is {self.pd.num_instances}; at least 1 is needed, or nothing decodes"
            )
        if self.num_prefill is not None and not 0 <= self.num_prefill < self.pd.num_instances:
            raise ConfigError(
                f"search.num_prefill is {self.num_prefill}; with pd.instances = "
                f"{self.pd.num_instances} it is 0 to {self.pd.num_instances - 1}, or nothing "
                "decodes"
            )
        if self.workload.output_tokens <= 0:
            raise ConfigError(
                f"workload.output_tokens is {self.workload.output_tokens}; it has to be above 0"
            )
        if self.step_tokens < 1:
            raise ConfigError(f"search.step is {self.step_tokens}; it has to be at least 1 token")
        lengths = self.workload.lengths
        points = (lengths.high - lengths.low) / self.step_tokens * self.pd.num_instances
        if points > SEARCH_POINTS_MAX:
            raise ConfigError(
                f"search.step = {self.step_tokens} makes {points:,.0f} points of thresholds and "
                f"splits, at most {SEARCH_POINTS_MAX:,} are tried; take a larger step"
            )
        for cluster in self.prfaas:
            if cluster.num_instances < 0:
                raise ConfigError(
                    f"prfaas {cluster.name!r}: instances is {cluster.num_instances}; it has to be "
                    "0 or more"
                )

    def _check_links(self) -> None:
        for cluster in self.prfaas:
            if cluster.link.bits_per_s <= 0:
                raise ConfigError(
                    f"prfaas {cluster.name!r}: link.bandwidth is {cluster.link.bits_per_s:.0f} "
                    'bit/s; it has to be above 0, as in "100Gbps"; leave the cluster out to plan '
                    "without it"
                )

    @property
    def prefill_profiles(self) -> tuple[PrefillProfile, ...]:
        """Profiles of all clusters, the PD cluster's last."""
        return (*(cluster.prefill for cluster in self.prfaas), self.pd.prefill)

    @property
    def mean_new_tokens(self) -> float:
        """E[L], tokens."""
        return mean_length(self.workload.lengths)

    @property
    def decode_slots(self) -> int:
        """Sequences that a decode instance runs at once within its target, at least 1.

        Raises:
            ConfigError: The smallest measured batch misses the target.
        """
        pd, context = self.pd, self.workload.mean_context
        batch, step_s = pd.decode.largest_batch(context, pd.tpot_max_s)
        if batch < 1 and pd.tpot_max_s is not None:
            raise ConfigError(
                f"decode profile {pd.decode.name!r}: a batch of {pd.decode.batches[0]} at "
                f"{context:.0f} tokens takes {step_s * 1e3:.1f} ms a step, the target is "
                f"{pd.tpot_max_s * 1e3:.1f} ms; relax tpot_max or slo.tpot, or take faster "
                "instances"
            )
        return max(int(batch), 1)

    @property
    def misses_tpot(self) -> bool:
        """Return True if not even the smallest measured batch meets the target of decode."""
        return self.pd.decode.largest_batch(self.workload.mean_context, self.pd.tpot_max_s)[0] < 1

    @property
    def gpu_price_per_h(self) -> float:
        """Price of all GPUs for one hour."""
        pd = self.pd.num_instances * self.pd.price_per_instance_h
        return pd + sum(cluster.price_per_h for cluster in self.prfaas)

    def with_cluster(self, index: int, cluster: PrfaasCluster) -> Problem:
        """The same question with one PrfaaS cluster replaced."""
        clusters = list(self.prfaas)
        clusters[index] = cluster
        return replace(self, prfaas=tuple(clusters))
