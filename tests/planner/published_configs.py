"""KV cache specs that vLLM declares for published `config.json` files, as JSON.

    python tests/planner/published_configs.py DATA [NAME...]

prints DATA (the form of `data/published_configs.json.gz`, unpacked) with what vLLM's own model
classes declare for each model, built on the `meta` device from the file as published: the layers,
and the format of keys and values that it takes for `--kv-cache-dtype auto`. Weights are left in
the model's dtype, since a CPU lacks most quantised kernels; the format of the cache is read
before. What a CPU lacks and a cache does not need is replaced: sparse attention by dense, experts
of Nemotron by an MLP, streams and events of CUDA, `torchvision`.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

_TOWERLESS = {"kimi_k2": "DeepseekV3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
"""Text parts that are built alone, since their vision towers copy values."""


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of `torchvision`, which processors of images import."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__.update(__path__=[], __version__="0", __getattr__=_attribute)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: the module makes its names when they are asked for."""


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def main() -> None:
    """Print the file with vLLM's specs."""
    sys.meta_path.append(_NoTorchvision())
    data: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    names = sys.argv[2:] or [name for name in data if name != "vllm"]
    _prepare()
    import vllm

    print(json.dumps({"vllm": vllm.__version__} | {n: data[n] | _specs(data[n]) for n in names}))


def _prepare() -> None:
    import torch
    import vllm.model_executor.layers.fused_moe.config as experts
    from vllm.distributed import init_distributed_environment
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.platforms.cpu import CpuPlatform

    registry._run_in_subprocess = lambda inspect: inspect()  # one import of vLLM, not one a model
    choose = CpuPlatform.get_attn_backend_cls

    def dense(
        _cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> Any:
        return choose(selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(current_platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    class Event:
        def __init__(self, *_args: Any, **_options: Any) -> None:
            pass

    CpuPlatform.get_attn_backend_cls = classmethod(dense)
    experts.current_platform = Platform()
    torch.Event = torch.cuda.Event = torch.cuda.Stream = Event
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")


def _specs(entry: dict[str, Any]) -> dict[str, Any]:
    import torch

    files = {"config": entry["config"]} | {k: entry[k] for k in ("hf_quant_config",) if k in entry}
    try:
        return {"kv": _kv_dtype(files)} | _layers(_plain(entry["config"]))
    except Exception as problem:
        return {"refusal": f"{type(problem).__name__}: {problem}".replace("\n", " ")[:240]}
    finally:
        torch.set_default_dtype(torch.float32)


def _written(files: dict[str, Any]) -> str:
    directory = Path(tempfile.mkdtemp())
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return str(directory)


def _kv_dtype(files: dict[str, Any]) -> str:
    """vLLM's reading of the files as published."""
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    _register(files["config"])
    config = get_config(_written(files), trust_remote_code=False)
    ModelArchConfigConvertorBase(config, config.get_text_config()).get_quantization_config()
    return str(resolve_kv_cache_dtype_string("auto", types.SimpleNamespace(hf_config=config)))


def _register(config: dict[str, Any]) -> None:
    """A plain class for a type whose class would come with the checkpoint."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    name = config.get("model_type")
    if name and name not in CONFIG_MAPPING and name not in _CONFIG_REGISTRY:
        AutoConfig.register(name, type("Plain", (PretrainedConfig,), {"model_type": name}))


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The config without quantisation, and without what a CPU or `meta` lacks."""
    plain = copy.deepcopy(config)
    text = plain.get("text_config", {})
    if text.get("model_type") in _TOWERLESS:
        text.setdefault("torch_dtype", plain.get("torch_dtype") or plain.get("dtype"))
        plain = text | {"architectures": [_TOWERLESS[text["model_type"]]]}
    for part in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
        part.pop("compression_config", None)
    if "E" in str(plain.get("hybrid_override_pattern")):
        plain["hybrid_override_pattern"] = plain["hybrid_override_pattern"].replace("E", "-")
    for field in ("layers_block_type", "layer_types"):
        if "moe" in plain.get(field, ()):
            plain[field] = ["mlp" if kind == "moe" else kind for kind in plain[field]]
    return plain


def _layers(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    engine = EngineArgs(
        model=_written({"config": config}),
        skip_tokenizer_init=True,
        max_model_len=2048,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    ).create_engine_config()
    with set_current_vllm_config(engine):
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(engine.model_config.dtype)
        with torch.device("meta"):
            initialize_model(engine)
        torch.set_default_dtype(torch.float32)
        current_platform.update_block_size_for_backend(engine)
        parts = engine.compilation_config.static_forward_context
        specs = [p.get_kv_cache_spec(engine) for p in parts.values() if _has_cache(p)]
        parts.clear()
    counted = Counter((_window(s), s.real_page_size_bytes) for s in specs if s is not None)
    return {
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "state_dtype": engine.cache_config.mamba_ssm_cache_dtype,
        "block_size": engine.cache_config.block_size,
        "layers": [[window, page, count] for (window, page), count in counted.items()],
    }


def _has_cache(part: Any) -> bool:
    return hasattr(part, "get_kv_cache_spec")


def _window(spec: Any) -> int | None:
    """Tokens that a layer keeps at most."""
    found: int | None = getattr(spec, "sliding_window", None)
    return found or getattr(spec, "attention_chunk_size", None)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    main()
