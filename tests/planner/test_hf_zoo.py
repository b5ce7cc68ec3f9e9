"""Every causal model of `transformers`: equal to its own cache objects, explained, or refused.

`data/hf_zoo.json.gz` holds the default configs and the elements that the caches of `transformers`
hold for them, written by `hf_zoo.py`; a few are built anew here, so that the file cannot be wrong
unnoticed. Planner figures are compared in elements: bf16 bytes over two.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import KvGeometry, LayerKind, kv_bytes

_FILE = Path(__file__).with_name("data") / "hf_zoo.json.gz"
ZOO: dict[str, Any] = json.loads(gzip.decompress(_FILE.read_bytes()))
VERSION = ZOO.pop("transformers")
CONFIGS = {name: entry["config"] for name, entry in ZOO.items() if "config" in entry}

# Accepted, but transformers cannot build the model from its defaults on the meta device.
WITHOUT_REFERENCE = {
    "bert-generation": "an encoder unless is_decoder is set",
    "cohere_compass_text": "its defaults lack the rope of its own layer type",
    "dots1": "its experts make tensors that the meta device lacks",
    "jetmoe": "its experts need values",
    "gemma3n": "needs timm; its text part is compared as gemma3n_text",
}
# The latent in transformers; keys and values of every head in vLLM (test_published_configs.py).
EXPANDED_BY_VLLM = {"minicpm3"}
EQUAL, EXPLAINED, REFUSED, UNBUILT = "equal", "explained", "refused", "not built"


NAMELESS = KvGeometry("refused without naming a field", ())


def _geometry(name: str) -> KvGeometry | None:
    try:
        return geometry_from_config(
            CONFIGS[name], name=name, kv_dtype="bfloat16", state_dtype="bfloat16"
        )
    except ConfigError as refusal:
        return None if re.search(r"\bfields?\b", str(refusal)) else NAMELESS


def _their_elements(layers: list[dict[str, int]], *, as_vllm: bool) -> int:
    """Elements of their cache, or what vLLM keeps of it: inputs of a convolution but the newest."""
    total = 0
    for layer in layers:
        sizes = {k: v for k, v in layer.items() if k != "kernel"}
        if as_vllm and "conv_states" in sizes:
            sizes["conv_states"] -= sizes["conv_states"] // layer["kernel"]
        if as_vllm:
            sizes.pop("indexer_keys", None)  # fp8 with scales in vLLM: compared without
        total += sum(sizes.values())
    return total


def _our_elements(geometry: KvGeometry, length: int, *, as_vllm: bool) -> int:
    indexers = sum(
        group.num_bytes(length)
        for group in geometry.groups
        if as_vllm and group.kind is LayerKind.INDEXER
    )
    return (kv_bytes(geometry, length) - indexers) // 2


def _agree(geometry: KvGeometry, caches: dict[str, Any], *, as_vllm: bool) -> bool:
    return all(
        _our_elements(geometry, int(length), as_vllm=as_vllm)
        == pytest.approx(_their_elements(layers, as_vllm=as_vllm), rel=0.01)
        for length, layers in caches.items()
    )


def verdict(name: str) -> str:
    """EQUAL, EXPLAINED, REFUSED, UNBUILT, or what is wrong."""
    geometry = _geometry(name)
    if geometry is None:
        return REFUSED
    if geometry is NAMELESS:
        return geometry.name
    caches = ZOO[name].get("caches")
    if caches is None:
        return UNBUILT if name in WITHOUT_REFERENCE else f"no reference: {ZOO[name]['error']}"
    if _agree(geometry, caches, as_vllm=False):
        return EQUAL
    if name in EXPANDED_BY_VLLM:
        return EXPLAINED
    return EXPLAINED if _agree(geometry, caches, as_vllm=True) else "DIFFERENT"


VERDICTS = {name: verdict(name) for name in sorted(CONFIGS)}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_no_default_config_gives_a_wrong_cache(name: str) -> None:
    assert VERDICTS[name] in (EQUAL, EXPLAINED, REFUSED, UNBUILT)


def test_the_documented_counts_are_these() -> None:
    counts = Counter(VERDICTS.values())
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    page = " ".join(page.split())
    assert f"{counts[EQUAL]} are equal; {counts[EXPLAINED]} differ for a known reason" in page
    assert f"{counts[REFUSED]} are refused with the field" in page
    assert f"{counts[UNBUILT]} cannot be built from their defaults" in page


def test_most_decoders_are_understood() -> None:
    assert Counter(VERDICTS.values())[EQUAL] >= 90


def test_the_records_are_of_the_installed_transformers() -> None:
    """Those of its defaults as well; `make test-nightly` makes both anew."""
    assert importlib.metadata.version("transformers") == VERSION


@pytest.mark.nightly
def test_the_recorded_caches_are_those_of_the_installed_transformers() -> None:
    names = ["llama", "qwen3", "gemma4_text", "kimi_linear", "deepseek_v32", "mamba2", "lfm2"]
    program = Path(__file__).with_name("hf_zoo.py")
    output = subprocess.run(
        [sys.executable, str(program), "--short", *names],
        check=True,
        capture_output=True,
        text=True,
        timeout=170,
    ).stdout
    found = json.loads(output)
    for name in names:
        for length, layers in found[name]["caches"].items():
            assert layers == ZOO[name]["caches"][length]
