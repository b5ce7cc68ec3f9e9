"""The planner's bytes are the bytes vLLM's own cache specs declare, to the last one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import (
    KvGeometry,
    hybrid_block_size,
    padded_page_bytes,
    page_bytes,
)

from . import tiny_models

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MODELS: dict[str, dict[str, Any]] = {
    "demo": tiny_models.DEMO,
    "gemma3": tiny_models.GEMMA3,
    "deepseek": tiny_models.DEEPSEEK,
    "lfm2": tiny_models.LFM2,
    "nemotron_h": tiny_models.NEMOTRON_H,
    "falcon_h1": tiny_models.FALCON_H1,
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    program = Path(__file__).with_name("vllm_specs.py")
    output = subprocess.run(
        [sys.executable, str(program), *(str(root / name) for name in MODELS)],
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
    ).stdout
    by_path: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return {Path(path).name: spec for path, spec in by_path.items()}


def _planner_pages(geometry: KvGeometry, block_size: int) -> Counter[tuple[int | None, int]]:
    """(window, unpadded page bytes) -> number of layers."""
    pages: Counter[tuple[int | None, int]] = Counter()
    for group in geometry.groups:
        pages[group.window, page_bytes(group, block_size)] += group.num_layers
    return pages


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_every_layer_equal_vllms(name: str, specs: dict[str, Any]) -> None:
    spec = specs[name]
    geometry = geometry_from_config(MODELS[name], name=name, state_dtype=spec["state_dtype"])
    theirs = Counter((layer["window"], layer["unpadded"]) for layer in spec["layers"])
    assert _planner_pages(geometry, spec["block_size"]) == theirs


@pytest.mark.parametrize("name", MODELS)
def test_padded_page_equals_vllms(name: str, specs: dict[str, Any]) -> None:
    spec = specs[name]
    geometry = geometry_from_config(MODELS[name], name=name, state_dtype=spec["state_dtype"])
    pages = {layer["page"] for layer in spec["layers"]}
    assert pages == {padded_page_bytes(geometry, spec["block_size"])}


def test_block_size_of_the_demo_is_vllms(specs: dict[str, Any]) -> None:
    # vLLM's CPU kernels take multiples of 128 tokens; a CPU with AVX-512-BF16 keeps the state in
    # fp32, which makes the block 384 tokens, others in bf16, which makes it 256.
    state_dtype = specs["demo"]["state_dtype"]
    geometry = geometry_from_config(tiny_models.DEMO, state_dtype=state_dtype)
    assert specs["demo"]["block_size"] == hybrid_block_size(geometry, alignment=128)
