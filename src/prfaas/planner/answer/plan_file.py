"""The plan file: tables and units of a TOML file that asks the planner a question."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from prfaas.core.codec.codecs import TYPE_RATIOS, LinkCodec, Quality
from prfaas.core.codec.gain import BLOCK_TOKENS, CODEC_BYTES_PER_S
from prfaas.core.transfer.pacing import CONNECTIONS_MAX
from prfaas.core.transfer.tcp_goodput import CongestionControl
from prfaas.toml_tables import quantity
from prfaas.units import NS_PER_S, parse_duration, parse_rate, parse_size


def _seconds(value: object) -> float:
    return quantity(value, parse_duration, "250ms") / NS_PER_S


def _bits_per_s(value: object) -> float:
    return float(quantity(value, parse_rate, "10Gbps"))


def _bytes(value: object) -> int:
    return quantity(value, parse_size, "16GiB")


CODEC_RATIO_MAX = 4.0
"""Largest ratio of a lossless codec that is taken for a plan."""

Seconds = Annotated[float, BeforeValidator(_seconds)]
BitsPerSecond = Annotated[float, BeforeValidator(_bits_per_s)]
SizeBytes = Annotated[int, BeforeValidator(_bytes)]
Positive = Annotated[float, Field(gt=0, le=1e15)]
Ratio = Annotated[float, Field(ge=1e-4, le=1)]
Tokens = Annotated[float, Field(ge=1, le=1e9)]
"""Tokens of a prompt or an output."""
Target = Annotated[Seconds, Field(gt=0, le=1e6)]
"""Target for a time, above 0 and at most 11 days."""
Delay = Annotated[Seconds, Field(ge=0, le=3600)]
"""Time that something takes beside its work, at most an hour."""
Span = Annotated[Seconds, Field(gt=0, le=1e7)]
"""Time that has to pass, above 0 and at most 115 days."""
Interval = Annotated[Seconds, Field(ge=0.001, le=1e6)]
"""Time between two events of a run; a shorter one would make it endless."""
Bandwidth = Annotated[BitsPerSecond, Field(gt=0, le=10**18)]
Price = Annotated[float, Field(gt=0, le=1e12)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PlanModelTable(_Table):
    """`[model]`: one of a catalogue name, a `config.json`, or the cache by hand."""

    catalogue: str | None = None
    """Name in the catalogue; `prfaas model --list` shows all."""
    config: str | None = None
    """Path of a Hugging Face `config.json`, relative to the plan file."""
    name: str | None = None
    """Name for people, with `kv_bytes_per_token`."""
    kv_bytes_per_token: Annotated[SizeBytes, Field(gt=0, le=2**40)] | None = None
    """KV cache of one token, all layers."""
    kv_state: Annotated[SizeBytes, Field(le=2**50)] = 0
    """Recurrent state of one sequence, all layers."""
    kv_dtype: str = "auto"
    """Format of keys and values."""
    state_dtype: str = "auto"
    """Format of recurrent states."""
    parameters: Annotated[float, Field(ge=1e3, le=1e17)] | None = None
    """All weights, for the roofline of a `config.json`."""
    active_parameters: Annotated[float, Field(ge=1e3, le=1e17)] | None = None
    """Weights that one token uses."""

    @model_validator(mode="after")
    def _one_source(self) -> PlanModelTable:
        given = [self.catalogue, self.config, self.kv_bytes_per_token]
        if sum(x is not None for x in given) != 1:
            raise ValueError("exactly one of catalogue, config, kv_bytes_per_token is needed")
        total, active = self.parameters, self.active_parameters
        if total is not None and active is not None and active > total:
            raise ValueError(f"active_parameters {active:g} are more than parameters {total:g}")
        return self


class PlanWorkloadTable(_Table):
    """`[workload]`: the traffic."""

    distribution: Literal["lognormal", "trace", "lengths"]
    """Source of the prompt lengths."""
    mu: Annotated[float, Field(ge=0, le=20)] | None = None
    """Mean of ln(tokens), for lognormal."""
    sigma: Annotated[float, Field(gt=0, le=10)] | None = None
    """Standard deviation of ln(tokens), for lognormal."""
    min_tokens: Tokens | None = None
    """Shortest prompt, for lognormal."""
    max_tokens: Tokens | None = None
    """Longest prompt, for lognormal."""
    trace: str | None = None
    """Path of a trace, relative to the plan file; its prefix hits count."""
    cache_blocks: Annotated[int, Field(ge=1)] | None = None
    """Prefix cache that the trace is replayed against, in 512-token blocks; unlimited if absent."""
    lengths: list[Tokens] | None = None
    """Prompt lengths, tokens, one for each request."""
    prefix_hit_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every prompt that the prefix cache serves; a trace brings its own."""
    output_tokens: Annotated[float, Field(le=1e9)]
    """Mean output length, tokens."""
    arrival_rate: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    """Demand, req/s: the load for the latency with queueing, which the plan has to carry. If
    absent, 80 % of the sustained rate."""
    arrival_cv: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Variation of the gaps between arrivals; 1 is Poisson, more is burstier."""

    @model_validator(mode="after")
    def _parameters(self) -> PlanWorkloadTable:
        needed = {
            "lognormal": ("mu", "sigma", "min_tokens", "max_tokens"),
            "trace": ("trace",),
            "lengths": ("lengths",),
        }[self.distribution]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f'distribution = "{self.distribution}" needs {", ".join(missing)}')
        return self


class PrefillTable(_Table):
    """`[prefill]`: measured prefill times of one instance."""

    source: str
    """Source of the numbers."""
    lengths: list[Tokens]
    """Prompt lengths, tokens, rising."""
    seconds: list[Annotated[float, Field(ge=1e-6, le=1e6)]]
    """Prefill time at each length, s."""
    extrapolate: bool = False
    """Extend the end segments outside the lengths; the output reports it."""
    prefixes: list[Positive] = []
    """Cached prefixes at which prefills were measured, tokens, rising."""
    resume_seconds: list[Annotated[float, Field(ge=0)]] = []
    """Time of a prefill after each of them beside its new tokens, s."""
    fit: str = ""
    """Quality of the measurement, for people."""


class DecodeTable(_Table):
    """`[decode]`: measured decode step times of one instance."""

    source: str
    """Source of the numbers."""
    batches: list[Annotated[int, Field(ge=1, le=10**6)]]
    """Batch sizes, rising."""
    contexts: list[Tokens] = [1.0]
    """Context lengths, tokens, rising."""
    step: list[list[Annotated[Seconds, Field(ge=1e-6, le=3600)]]]
    """Step time: one row for each batch, one column for each context."""
    fit: str = ""
    """Quality of the measurement, for people."""


class RooflineTable(_Table):
    """`[roofline]`: an instance from peak figures, when nothing was measured."""

    accelerator: str
    """Name in the catalogue: h200, h100, h20, b200, a100, l40s."""
    weights: Literal["int4", "fp8", "bf16"] = "bf16"
    """Format of the weights; int4 is weight-only, with products in bf16."""
    prefill_efficiency: Ratio
    """Share of the tensor peak that prefill reaches."""
    decode_efficiency: Ratio = 0.6
    """Share of the memory bandwidth that decode reaches."""
    overhead: Delay = 0.0
    """Fixed time of a prefill."""
    step_overhead: Delay = 0.003
    """Fixed time of a decode step: kernel launches, collectives, sampling, scheduling."""
    source: str
    """Source of the efficiencies."""


class ProfileFile(_Table):
    """A profile file, as `prfaas profile` writes it."""

    prefill: PrefillTable | None = None
    """Prefill times."""
    decode: DecodeTable | None = None
    """Decode times."""


class PlanLinkTable(_Table):
    """`[prfaas.link]`: the path to the PD cluster."""

    bandwidth: Annotated[BitsPerSecond, Field(le=10**18)]
    """Bandwidth that transfers can use without loss; what TCP carries of it follows from `rtt`,
    `loss` and both ends (`core/transfer/tcp_goodput.py`)."""
    rtt: Delay = 0.0
    """Round-trip time."""
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of segments that the path loses at random."""
    congestion_control: CongestionControl = CongestionControl.BBR
    """bbr, or cubic on hosts that do not allow it."""
    connections: Annotated[int, Field(ge=1, le=CONNECTIONS_MAX)] | None = None
    """Data connections of a pool node; its own choice if absent."""
    pool_nodes: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Pool nodes of the cluster that send over the link in parallel; a transfer uses one. One per 8
    GPUs if absent."""
    price_per_tb: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Price of moving 10**12 bytes."""
    codec: LinkCodec = LinkCodec.RAW
    """Coding of blocks without loss: raw, auto where it raises the rate of the link, as pool nodes
    do, or always. raw rounds nothing either."""
    codec_ratio: Annotated[float, Field(ge=1, le=CODEC_RATIO_MAX)] = TYPE_RATIOS["bfloat16"]
    """Bytes of a bfloat16 block for a byte on the link; other formats are sent raw."""
    codec_rate: Bandwidth = 8 * CODEC_BYTES_PER_S
    """Blocks that one core codes, and that one decodes."""
    codec_cores: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Cores that code at each end of the link; one a lane if absent."""
    quality: Quality = Quality.LOSSLESS
    """Quality class of the blocks: lossless, fp8, kivi4, bf16-state, fp8+bf16-state or
    kivi4+bf16-state."""
    quality_rate: Bandwidth | None = None
    """Blocks that one core rounds; as measured for the class if absent."""
    block_tokens: Annotated[int, Field(ge=1, le=2**20)] = BLOCK_TOKENS
    """Tokens of a block: kivi4 gains less in blocks of fewer than 32."""
    lanes: Annotated[int, Field(ge=1, le=4096)] = 1
    """I/O lanes at each end of the link (`link_lanes`), of all pool nodes together."""
    lane_rate: Bandwidth | None = None
    """Rate at which one lane sends or receives, encryption included, on one core; never the limit
    if absent."""

    @model_validator(mode="after")
    def _rounds(self) -> PlanLinkTable:
        if self.quality.is_lossy and self.codec is LinkCodec.RAW:
            raise ValueError(
                f'quality is "{self.quality}", but a link with codec = "raw" rounds nothing; set '
                'codec to "auto"'
            )
        return self


class _ClusterTable(_Table):
    name: str
    """Name for people."""
    instances: Annotated[int, Field(le=10_000)]
    """Instances of the cluster."""
    gpus_per_instance: Annotated[int, Field(ge=1, le=10_000)] = 1
    """GPUs of one instance."""
    price_per_gpu_hour: Price = 1.0
    """Price of one GPU for one hour, in one currency throughout the file."""
    profile: str | None = None
    """Path of a profile file, relative to the plan file."""
    prefill: PrefillTable | None = None
    """Prefill times, in place of the profile's."""
    roofline: RooflineTable | None = None
    """Times from peak figures, where none were measured."""


class PrfaasTable(_ClusterTable):
    """`[[prfaas]]`: a prefill-only cluster."""

    link: PlanLinkTable
    """Path to the PD cluster."""


class PdTable(_ClusterTable):
    """`[pd]`: the local cluster."""

    decode: DecodeTable | None = None
    """Decode times, in place of the profile's."""
    tpot_max: Target | None = None
    """Target for the time per output token; the largest batch that meets it is used."""
    kv_capacity: Annotated[SizeBytes, Field(gt=0, le=2**60)] | None = None
    """KV cache of one decode instance; derived from a roofline, else unlimited."""


class SearchTable(_Table):
    """`[search]`: how thresholds are tried."""

    step: Annotated[int, Field(le=10**9)] = 100
    """Distance between thresholds, tokens."""
    threshold: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Keep this threshold and search the split only, tokens."""
    num_prefill: Annotated[int, Field(ge=0)] | None = None
    """Keep this number of prefill instances N_p in the PD cluster and search the threshold only."""
    chunk: Annotated[int, Field(ge=1, le=10**9)] = 8192
    """Prefill chunk, tokens, for overlapped transfers."""


class PlanSloTable(_Table):
    """`[slo]`: targets that the plan has to meet."""

    ttft_p90: Target | None = None
    """Target for the 90th percentile of the time to first token, queueing included."""
    tpot: Target | None = None
    """Target for the time per output token; the stricter of this and pd.tpot_max counts."""


class PlanFile(_Table):
    """A plan file."""

    title: str
    """Title of the output."""
    model: PlanModelTable
    """The model."""
    workload: PlanWorkloadTable
    """The traffic."""
    prfaas: list[PrfaasTable] = []
    """PrfaaS clusters."""
    pd: PdTable
    """The PD cluster."""
    slo: PlanSloTable = PlanSloTable()
    """Targets."""
    search: SearchTable = SearchTable()
    """`[search]`: the thresholds and splits that are tried."""
