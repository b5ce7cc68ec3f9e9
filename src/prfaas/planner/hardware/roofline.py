"""Prefill and decode times from peak figures and an efficiency, when nothing was measured.

Assumptions, all of them:

- Prefill does `2 * active parameters` operations per token in the linear layers of the network;
  attention adds its own: `(d_qk + d_v) * heads * l^2` per causal full-attention layer,
  `2 * (d_qk + d_v) * heads` per token and visible key in a window, `4 * state elements` per token
  in a recurrent layer. Sparse attention sees the latents of `index_topk` keys at most, and its
  indexer all keys with heads of its own. After a cached prefix the new tokens alone count, with
  what they see of it. Its time is operations / (GPUs * peak * efficiency), not less than one read
  of all weights, plus a fixed overhead.
- A decode step reads the weights that the batch touches, and every sequence's KV cache once. Each
  token picks its active share of the weights at random, so a batch of b touches
  `1 - (1 - active / all)^b` of them. Its time is bytes / (GPUs * bandwidth * efficiency).
- Communication between GPUs, expert imbalance and scheduling are inside the efficiency, which
  therefore needs a provenance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prfaas.errors import ConfigError
from prfaas.planner.hardware.profiles import DecodeProfile, PrefillProfile
from prfaas.planner.model.active_parameters import active_parameters
from prfaas.planner.model.catalogue import Accelerator
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.hf_reader import ConfigReader
from prfaas.planner.model.kv_geometry import FloatArray, KvGeometry, LayerKind, kv_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model, for the roofline."""

    parameters: float
    active_parameters: float
    """Weights that one token uses."""
    config: Mapping[str, object]
    """`config.json`, for the attention shapes."""


def prefill_flops(geometry: KvGeometry, model: ModelSize, num_tokens: FloatArray) -> FloatArray:
    """Operations of one prefill.

    Args:
        model: Sizes and attention shapes.
        num_tokens: Prompt lengths, tokens, any shape.
    """
    flops = 2 * model.active_parameters * num_tokens
    config = ConfigReader(model.config, geometry.name)
    query_key_value, top = _query_key_value(config), _keys_max(config, geometry)
    for group in geometry.groups:
        if group.kind is LayerKind.MLA and top is not None:
            latent = _latent_query_key_value(config)
            flops = flops + group.num_layers * 2 * latent * _visible(num_tokens, top)
        elif group.kind in (LayerKind.FULL, LayerKind.MLA, LayerKind.SLIDING):
            pairs = _visible(num_tokens, group.window)
            flops = flops + group.num_layers * 2 * query_key_value * pairs
        elif group.kind is LayerKind.INDEXER:
            index = config.integer("index_n_heads", default=1) * config.integer("index_head_dim")
            flops = flops + group.num_layers * 2 * index * _visible(num_tokens, None)
        elif group.kind is LayerKind.LINEAR:
            elements = group.state_bytes / 4
            flops = flops + group.num_layers * 4 * elements * num_tokens
    return flops


def attention_tokens(geometry: KvGeometry, model: ModelSize) -> int:
    """Context at which attention costs a token as much as all else, tokens; 0 if it never does.

    Windows and sparse layers count with what they see, so only what grows with the context counts.
    """
    length = float(2**20)
    half, whole = prefill_flops(geometry, model, np.array([length, 2 * length])).tolist()
    square = (whole - 2 * half) / (2 * length**2)
    linear = half / length - square * length
    return round(linear / (2 * square)) if square > 0 and linear > 0 else 0


def attention_tokens_of(config: Mapping[str, object], name: str) -> int:
    """`attention_tokens` of a `config.json`; 0 if the weights of a token cannot be counted;
    ConfigError if the layers of the model are not understood."""
    weights = active_parameters(config, name)
    if weights is None:
        return 0
    geometry = geometry_from_config(config, name=name)
    return attention_tokens(geometry, ModelSize(weights, weights, config))


def _visible(num_tokens: FloatArray, window: float | None) -> FloatArray:
    """Pairs of a token and a key that it sees, over a causal prompt."""
    keys_max = np.inf if window is None else float(window)
    short = np.minimum(num_tokens, keys_max)
    return np.asarray(short**2 / 2 + np.maximum(num_tokens - keys_max, 0) * short)


def _keys_max(config: ConfigReader, geometry: KvGeometry) -> int | None:
    """Keys that a token of sparse attention sees at most; None without an indexer."""
    if not any(group.kind is LayerKind.INDEXER for group in geometry.groups):
        return None
    return config.integer("index_topk", default=0) or None


def _latent_query_key_value(config: ConfigReader) -> float:
    """Like `_query_key_value`, of MLA that attends to latents: keys are not expanded."""
    rank = config.integer("kv_lora_rank")
    return config.positive("num_attention_heads") * (2 * rank + config.integer("qk_rope_head_dim"))


def _query_key_value(config: ConfigReader) -> float:
    """Query heads times (key dimension + value dimension) of one attention layer."""
    heads = config.positive("num_attention_heads", "n_head")
    if config.integer("kv_lora_rank", default=0):
        key = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
        return heads * (key + config.integer("v_head_dim"))
    derived = config.integer("hidden_size", "n_embd") // heads
    key = config.integer("head_dim", default=derived)
    return heads * (key + config.integer("v_head_dim", default=key))


USABLE_RATIO = 0.9
"""Share of an instance's memory that weights and KV cache may take."""
# int4 is weight-only: 4 bits and one 16-bit scale per group of 128; products are in bf16.
_WEIGHT_BYTES = {"int4": 0.5 + 2 / 128, "fp8": 1.0, "bf16": 2.0}
_LENGTHS = tuple(float(x) for x in np.unique(np.geomspace(1, 2**20, 81).round()))
_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CONTEXTS = tuple(float(2**k) for k in range(8, 21))


@dataclass(frozen=True, slots=True)
class Roofline:
    """An instance described by its peaks."""

    accelerator: Accelerator
    """Peak figures of one GPU."""
    num_gpus: int
    weights: str
    """"int4", "fp8" or "bf16": bytes per weight and the matching tensor peak; int4 weights are
    multiplied at the bf16 peak."""
    prefill_efficiency: float
    """Share of the tensor peak that prefill reaches, in (0, 1]."""
    decode_efficiency: float
    """Share of the memory bandwidth that decode reaches, in (0, 1]."""
    overhead_s: float
    """Fixed time of a prefill, s."""
    source: str
    """Origin of the efficiencies."""
    step_overhead_s: float = 0.0
    """Fixed time of a decode step, s: launches, collectives, scheduling."""

    def __post_init__(self) -> None:
        if self.weights not in _WEIGHT_BYTES:
            raise ConfigError(
                f"roofline weights {self.weights!r} is not one of {', '.join(_WEIGHT_BYTES)}"
            )
        for name in ("prefill_efficiency", "decode_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"roofline {name} is {getattr(self, name)}; it is in (0, 1]")

    @property
    def flop_per_s(self) -> float:
        """Tensor throughput that prefill reaches."""
        gpu = self.accelerator
        peak = gpu.fp8_flop_per_s if self.weights == "fp8" else gpu.bf16_flop_per_s
        return self.num_gpus * peak * self.prefill_efficiency

    @property
    def memory_bytes_per_s(self) -> float:
        """Memory throughput that decode reaches."""
        return self.num_gpus * self.accelerator.memory_bytes_per_s * self.decode_efficiency

    def weight_bytes(self, model: ModelSize) -> float:
        """Bytes of all weights."""
        return model.parameters * _WEIGHT_BYTES[self.weights]


def prefill_profile(
    name: str, roofline: Roofline, geometry: KvGeometry, model: ModelSize
) -> PrefillProfile:
    """T_prefill(l) of the roofline, from 1 token to 1 M."""
    lengths = np.array(_LENGTHS)
    compute = prefill_flops(geometry, model, lengths) / roofline.flop_per_s
    read = roofline.weight_bytes(model) / (
        roofline.num_gpus * roofline.accelerator.memory_bytes_per_s
    )
    seconds = roofline.overhead_s + np.maximum(compute, read)
    # A prefix whose computation is shorter than the weights' read does not shorten that read.
    resume = roofline.overhead_s + np.maximum(read - compute, 0.0)
    times = tuple(seconds.tolist())
    return PrefillProfile(
        name,
        _source(roofline),
        _LENGTHS,
        times,
        prefixes=_LENGTHS,
        resume_seconds=tuple(resume.tolist()),
    )


def decode_profile(
    name: str, roofline: Roofline, geometry: KvGeometry, model: ModelSize
) -> DecodeProfile:
    """Decode step times of the roofline, for batches up to 512 that fit into memory.

    Raises:
        ConfigError: The weights leave no memory for KV cache.
    """
    require_room(name, roofline, model)
    table = tuple(
        tuple(_step_s(roofline, geometry, model, batch, context) for context in _CONTEXTS)
        for batch in _BATCHES
    )
    return DecodeProfile(name, _source(roofline), _BATCHES, _CONTEXTS, table)


def kv_capacity_bytes(roofline: Roofline, model: ModelSize) -> float:
    """Memory of the instance left for KV cache: 90 % of all, less the weights."""
    memory = roofline.num_gpus * roofline.accelerator.memory_bytes
    return memory * USABLE_RATIO - roofline.weight_bytes(model)


def require_room(name: str, roofline: Roofline, model: ModelSize) -> None:
    """Refuse an instance whose weights leave no memory for KV cache; ConfigError if they do not."""
    if kv_capacity_bytes(roofline, model) <= 0:
        memory = roofline.num_gpus * roofline.accelerator.memory_bytes
        raise ConfigError(
            f"{name}: the weights take {roofline.weight_bytes(model) / 1e9:.0f} GB, "
            f"{roofline.num_gpus} x {roofline.accelerator.name} have {memory / 1e9:.0f} GB, of "
            f"which {USABLE_RATIO:.0%} are used; no memory is left for KV cache; take more GPUs "
            "per instance or smaller weights"
        )


def _step_s(
    roofline: Roofline, geometry: KvGeometry, model: ModelSize, batch: int, context: float
) -> float:
    touched = 1 - (1 - model.active_parameters / model.parameters) ** batch
    weights = roofline.weight_bytes(model) * touched
    cache = batch * kv_bytes(geometry, int(context))
    return roofline.step_overhead_s + (weights + cache) / roofline.memory_bytes_per_s


def _source(roofline: Roofline) -> str:
    return (
        f"roofline of {roofline.num_gpus} x {roofline.accelerator.name} "
        f"({roofline.accelerator.source}), {roofline.weights} weights, prefill at "
        f"{roofline.prefill_efficiency:.0%} of the tensor peak, decode at "
        f"{roofline.decode_efficiency:.0%} of the memory bandwidth and "
        f"{roofline.step_overhead_s * 1e3:.3g} ms a step; efficiencies: "
        f"{roofline.source}"
    )
