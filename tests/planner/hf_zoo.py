"""Elements that the cache objects of `transformers` hold for its default causal-LM configs.

    python tests/planner/hf_zoo.py | gzip -n9 > tests/planner/data/hf_zoo.json.gz

builds every causal model on the meta device, runs it over two prompts, and prints for each model
type its `config.json` and the elements of the cache it returned, or why there is none. No weights,
no arithmetic: only shapes. Experts are left out, since their routing needs values.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

LENGTHS = (100, 5000)
SECONDS_MAX = 60

# Fields that the defaults leave open and without which the model cannot be built.
_FILL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "glm4_moe": {"head_dim": 128},
}
# Their scans go through a prompt token by token; the state does not depend on its length.
_SHORT = {
    "mamba",
    "mamba2",
    "falcon_mamba",
    "falcon_h1",
    "jamba",
    "rwkv",
    "xlstm",
    "zamba",
    "zamba2",
}
# Making their masks looks at values.
_READY_MASKS = {"gemma4", "gemma4_unified"}
# Their learned positions end there.
_ENDS_AT = {"openai-gpt": 500, "gpt_neo": 2000, "mpt": 2000, "git": 1000, "biogpt": 1000}
_FEW_LAYERS = {"mamba": 4, "falcon_mamba": 4, "jamba": 8}


def main() -> None:
    """Print one JSON object, by model type."""
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    signal.signal(signal.SIGALRM, _too_long)
    names = sys.argv[1:]
    if "--short" in names:  # the first prompt alone
        names.remove("--short")
        _SHORT.update(names)
    wanted = names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    print(json.dumps({"transformers": transformers.__version__} | {n: _entry(n) for n in wanted}))


def _entry(name: str) -> dict[str, Any]:
    try:
        config = _config(name)
    except Exception as problem:
        return {"error": f"{type(problem).__name__}: {problem}"[:200]}
    entry: dict[str, Any] = {"config": json.loads(json.dumps(config.to_dict(), default=str))}
    signal.alarm(SECONDS_MAX)
    try:
        entry["caches"] = _caches(name, config)
    except Exception as problem:
        entry["error"] = f"{type(problem).__name__}: {problem}"[:200]
    finally:
        signal.alarm(0)
    return entry


def _config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    fields = dict(_FILL.get(name, {}))
    if name in _FEW_LAYERS:
        fields["num_hidden_layers"] = _FEW_LAYERS[name]
    return CONFIG_MAPPING[name](**fields)


def _caches(name: str, config: Any) -> dict[str, list[dict[str, int]]]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.forward = lambda hidden, *_args, **_kwargs: hidden
    end = 100 if name in _SHORT else _ENDS_AT.get(name, LENGTHS[1])
    lengths = (LENGTHS[0], end) if end > LENGTHS[0] else LENGTHS[:1]
    return {str(length): _layers(name, model, length) for length in lengths}


def _layers(name: str, model: Any, length: int) -> list[dict[str, int]]:
    import torch

    tokens = torch.zeros((1, length), dtype=torch.long, device="meta")
    masks = {"full_attention": None, "sliding_attention": None} if name in _READY_MASKS else None
    with torch.no_grad():
        output = model(input_ids=tokens, attention_mask=masks, use_cache=True)
    cache = next(
        (
            c
            for f in ("past_key_values", "cache_params", "state")
            if (c := getattr(output, f, None))
        ),
        None,
    )
    layers = getattr(cache, "layers", None) or ([] if cache is None else [cache])
    apart = list(_tensors(getattr(cache, "linear_cache", None)))  # MiniMax keeps its states there
    return [_elements(layer) for layer in layers] + [{"state": tensor.numel()} for tensor in apart]


def _elements(layer: Any) -> dict[str, int]:
    """Elements of each tensor of one layer's cache, and how many inputs a convolution keeps."""
    found: dict[str, int] = {}
    for name, value in getattr(layer, "__dict__", {}).items():
        sizes = [(tensor.numel(), tensor.shape[-1]) for tensor in _tensors(value) if tensor.ndim]
        if sizes:
            found[name] = sum(numel for numel, _ in sizes)
            if "conv" in name:
                found["kernel"] = sizes[0][1]
    return found


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _too_long(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"not built and run within {SECONDS_MAX} s")


if __name__ == "__main__":
    main()
