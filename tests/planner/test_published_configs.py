"""Published `config.json` files, with the files beside them: the bytes are vLLM's, layer by layer.

`data/published_configs.json.gz` has 151 of them and what vLLM 0.32 declares for each, written by
`published_configs.py`; some are built anew here, so that the file cannot be wrong unnoticed.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.preflight.vllm_flags import installed_version
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_loader import read_config_json
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.hf_groups import MLA_TYPES
from prfaas.planner.model.kv_geometry import KvGeometry, kv_bytes, page_bytes

_FILE = Path(__file__).with_name("data") / "published_configs.json.gz"
PUBLISHED: dict[str, Any] = json.loads(gzip.decompress(_FILE.read_bytes()))
VERSION = PUBLISHED.pop("vllm")
BUILT = sorted(name for name, entry in PUBLISHED.items() if "layers" in entry)
_FORMATS = {"fp8_e4m3": "fp8"}

# vLLM builds them; the planner has no formula, and says so.
REFUSED = {
    "deepseek-ai/DeepSeek-V4-Flash": "compress_ratios",
    "deepseek-ai/DeepSeek-V4-Pro": "compress_ratios",
    "nvidia/DeepSeek-V4-Flash-NVFP4": "compress_ratios",
    "nvidia/DeepSeek-V4-Pro-NVFP4": "compress_ratios",
    "gte_qwen2_7b": "is_causal is false",
}
# The class that comes with the checkpoint removes the window (`use_sliding_window`).
OWN_CLASS = {"XiaomiMiMo/MiMo-7B-Base"}


def _geometry(name: str, tmp_path: Path, **options: str) -> KvGeometry:
    """The geometry from the files as they lie in a checkpoint."""
    for file in ("config", "hf_quant_config"):
        if file in PUBLISHED[name]:
            (tmp_path / f"{file}.json").write_text(json.dumps(PUBLISHED[name][file]))
    config = read_config_json(tmp_path / "config.json")
    return geometry_from_config(config, name=name, **options)


def _layers(geometry: KvGeometry, block_size: int) -> Counter[tuple[int | None, int]]:
    layers: Counter[tuple[int | None, int]] = Counter()
    for group in geometry.groups:
        layers[group.window, page_bytes(group, block_size)] += group.num_layers
    return layers


@pytest.mark.parametrize("name", [n for n in BUILT if n not in REFUSED and n not in OWN_CLASS])
def test_every_layer_has_the_bytes_that_vllm_declares(name: str, tmp_path: Path) -> None:
    theirs = PUBLISHED[name]
    # vLLM's layers are declared in the model's dtype; what it takes for "auto" is compared below.
    geometry = _geometry(
        name, tmp_path, kv_dtype=theirs["dtype"], state_dtype=theirs["state_dtype"]
    )
    expected = Counter({(window, page): count for window, page, count in theirs["layers"]})
    assert _layers(geometry, theirs["block_size"]) == expected


@pytest.mark.parametrize(
    "name", sorted(n for n, e in PUBLISHED.items() if "kv" in e and n not in REFUSED)
)
def test_the_format_of_the_cache_is_that_of_vllm(name: str, tmp_path: Path) -> None:
    theirs = PUBLISHED[name]
    auto = theirs.get("dtype", "bfloat16")
    assert _geometry(name, tmp_path).kv_dtype == _FORMATS.get(theirs["kv"], theirs["kv"]).replace(
        "auto", auto
    )


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_formula_is_refused_with_advice_that_works(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]) as refusal:
        _geometry(name, tmp_path)
    assert "add layer_types" not in str(refusal.value)
    assert "by hand with kv_bytes_per_token" in str(refusal.value) or "decoders" in str(refusal)


def test_kimi_k3_which_a_cpu_cannot_build_has_the_bytes_of_its_catalogue(tmp_path: Path) -> None:
    geometry = _geometry("moonshotai/Kimi-K3", tmp_path, state_dtype="float32")
    assert kv_bytes(geometry, 32_768) / 2**20 == pytest.approx(1292.6, abs=0.05)


def test_the_page_has_every_count() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    num_equal = len(set(BUILT) - set(REFUSED) - OWN_CLASS)
    assert f"{num_equal} of the files are equal, {len(REFUSED)} are refused" in page
    assert f"vLLM builds no model of {len(PUBLISHED) - len(BUILT)}," in page
    assert num_equal >= 60


def test_a_file_beside_the_config_counts_only_where_the_config_has_none(tmp_path: Path) -> None:
    name = "nvidia/Llama-3.1-70B-Instruct-FP8"
    assert _geometry(name, tmp_path).kv_dtype == "fp8"
    own = PUBLISHED[name]["config"] | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    config = read_config_json(tmp_path / "config.json")
    assert geometry_from_config(config).kv_dtype == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json is no valid JSON"):
        read_config_json(tmp_path / "config.json")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_records_are_of_the_installed_vllm() -> None:
    """`make test-nightly` makes them anew."""
    assert (installed_version() or "").partition("+")[0] == VERSION


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_recorded_layers_are_those_of_the_installed_vllm(tmp_path: Path) -> None:
    # A model with experts first: vLLM makes their group of ranks for the first model alone.
    names = [
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "Qwen/Qwen3-0.6B",
        "minicpm3_4b",
        "nvidia/GLM-5.2-NVFP4",
        "nvidia/Gemma-4-31B-IT-NVFP4",
        "llava_1.5_7b_hf",
    ]
    data = tmp_path / "published.json"
    data.write_text(json.dumps({name: PUBLISHED[name] for name in names}))
    program = Path(__file__).with_name("published_configs.py")
    output = subprocess.run(
        [sys.executable, str(program), str(data)],
        check=True,
        capture_output=True,
        text=True,
        timeout=580,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ).stdout
    found = json.loads(output.strip().splitlines()[-1])
    assert found.pop("vllm") == VERSION
    assert found == {name: PUBLISHED[name] for name in names}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_types_whose_latent_is_stored_are_those_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")  # read as text: to import it takes a minute
    assert spec is not None
    assert spec.origin is not None
    module = Path(spec.origin).parent / "transformers_utils" / "model_arch_config_convertor.py"
    source = module.read_text()
    mla = source.split("def is_deepseek_mla", 1)[1]
    listed = mla.split("model_type in (", 1)[1].split(")", 1)[0]
    theirs = {word.strip(' ",') for word in listed.splitlines() if word.strip().startswith('"')}
    drafts = {name for name in theirs if name.endswith(("_mtp", "_dspark"))}
    # Their latents are compressed over tokens, for which there is no formula.
    compressed = {"deepseek_v4", "deepseek_v41"}
    assert theirs - drafts - compressed == MLA_TYPES
