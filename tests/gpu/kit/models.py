"""Checkpoints with random weights that vLLM runs without compiled kernels.

None has experts, whose kernels are not in the kit.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prfaas.engines.checkpoint import HYBRID, make_checkpoint
from tests.live.model_kinds import KINDS, make_model

DENSE, HYBRID_KIND = "dense", "hybrid"
_FIELDS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_STATES = ("linear_num_key_heads", "linear_num_value_heads")
_SIZES = ("linear_key_head_dim", "linear_value_head_dim", "hidden_size", "intermediate_size")
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    DENSE: KINDS["grouped queries (Llama)"],
    HYBRID_KIND: (
        "qwen3_5_text",
        {name: HYBRID[name] for name in (*_FIELDS, *_STATES, *_SIZES)},
    ),
}
"""Type of the configuration, and its fields: grouped queries (Llama), and three layers of gated
delta net to one of full attention (Qwen3.5)."""


def make(
    kind: str, directory: Path, fields: dict[str, Any] | None = None, device: str = "cpu"
) -> None:
    """Write a checkpoint of one of `CHECKPOINTS`.

    Args:
        kind: Its name.
        directory: A new one.
        fields: What its configuration has otherwise, such as its sizes.
        device: Where its weights are drawn; a large one takes long on a CPU.
    """
    import torch

    if kind == HYBRID_KIND and find_spec("torchvision") is None:
        # vLLM imports it for Qwen3.5. The demo's model has experts; vLLM's build for CPUs runs it.
        make_checkpoint(directory)
        return
    model_type, known = CHECKPOINTS[kind]
    with torch.device(device):
        make_model(model_type, known | (fields or {}), directory)
