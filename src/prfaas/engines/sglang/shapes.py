"""Engines that cannot share pages, refused in words when they start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prfaas.errors import ConfigError

KV = "kv"
"""SGLang's name of the pool of attention."""
MAMBA = "mamba"
LOADERS = frozenset({"auto", "bitsandbytes", "dummy", "gguf", "npcache", "pt", "safetensors"})
"""Values of `--load-format` that load the files of the checkpoint."""
UPSTREAM = "https://github.com/sgl-project/sglang/issues/39830"


def check_pools(pools: Iterable[str], *, accepts_unproven: bool) -> None:
    """Refuse models that keep more than the keys and values of full attention.

    Raises:
        ConfigError: There is another pool.
    """
    others = sorted(set(pools) - {KV})
    if others and not accepts_unproven:
        raise ConfigError(
            f"this model has {', '.join(others)} besides the pages of full attention. SGLang "
            "restores the bytes of such models from its host tier, and answers with them differ "
            f"from answers without ({UPSTREAM}); no run on a GPU has shown otherwise. Serve this "
            "model with vLLM, or start SGLang without --hicache-storage-backend"
        )


def check_ranks(config: Any) -> None:
    """Refuse ranks whose parts of a page have no name here (`HiCacheStorageConfig`).

    Raises:
        ConfigError: There is one.
    """
    found = {
        "--pp-size": (config.pp_size, 1, "a stage does not know the pages of the others"),
        "--attn-cp-size": (config.attn_cp_size, 1, "a rank holds a part of each page"),
        "decode context parallelism": (config.dcp_size, 1, "a rank holds a part of each page"),
        "data-parallel rank": (config.dp_rank, 0, "start an engine of its own for each rank"),
    }
    for name, (value, limit, why) in found.items():
        if value != limit:
            raise ConfigError(f"{name} is {value}; the pool node needs {limit}: {why}")
    if config.should_split_heads:
        raise ConfigError("tp_lcm_size splits pages by head; leave it out, and use one --tp-size")


def check_nodes(num_nodes: int) -> None:
    """Refuse an engine with ranks on several hosts.

    Raises:
        ConfigError: There are several.
    """
    if num_nodes > 1:
        raise ConfigError(
            f"--nnodes {num_nodes}: each rank hands its part of a page to the pool node of its own "
            "host, and no pool node has whole pages. Run all ranks of an engine on one host, and "
            "an engine of its own on each host"
        )


def check_features(values: Mapping[str, Any]) -> None:
    """Refuse features whose pages mean something that their names do not say.

    Args:
        values: SGLang's resolved configuration by dotted name.

    Raises:
        ConfigError: There is one.
    """
    if values.get("spec.speculative_algorithm"):
        raise ConfigError(
            f"speculative decoding ({values['spec.speculative_algorithm']}) names pages by pairs "
            "of tokens and packs a draft model's into them; start SGLang without it"
        )
    loader = values.get("model.load_format", "auto")
    if loader not in LOADERS or values.get("model.custom_weight_loader"):
        raise ConfigError(
            f"weights that --load-format {loader} or a loader of your own brings are not those of "
            f"the checkpoint's files, which name the pages; use {', '.join(sorted(LOADERS))}"
        )
    if values.get("lora.enable_lora") or values.get("lora.lora_paths"):
        raise ConfigError(
            "names of pages do not identify the bytes of an adapter; start SGLang without LoRA"
        )
