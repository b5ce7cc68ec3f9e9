"""Small adapters (LoRA) with random weights, for checkpoints of `model_kinds`."""

from __future__ import annotations

import json
from pathlib import Path

RANK = 8
SPREAD = 0.2
"""Of their weights: wide enough that answers change."""
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(model: Path, directory: Path, seed: int) -> None:
    """Write an adapter of all attention projections of a checkpoint, in PEFT's format."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind not in _TARGETS:
            continue
        rows, columns = weight.shape
        for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
            drawn = torch.randn(shape, generator=generator) * SPREAD
            weights[f"base_model.model.{layer}.{kind}.{part}.weight"] = drawn.to(torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_TARGETS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
