"""Facts of engines as vLLM's own code configures them: what differs has a name, the rest none."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import differences, facts_id
from prfaas.engines.checkpoint import make_checkpoint

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    }
}

SHOWN = 3
"""Differences that are written out wherever one looks."""
STATE = ["--mamba-ssm-cache-dtype"]
ALTERED: dict[str, tuple[list[str], str]] = {
    "state in float16": ([*STATE, "float16"], "group.0.dtypes"),
    "state in bfloat16": ([*STATE, "bfloat16"], "group.0.dtypes"),
    "convolution in float32": (["--mamba-cache-dtype", "float32"], "group.0.dtypes"),
    "YaRN": (["--hf-overrides", json.dumps(YARN)], "config.rope_parameters.rope_type"),
    "another theta": (
        ["--hf-overrides", '{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}'],
        "config.rope_parameters.rope_theta",
    ),
    "another epsilon": (["--hf-overrides", '{"rms_norm_eps": 1e-5}'], "config.rms_norm_eps"),
    "weights in float16": (["--dtype", "float16"], "model_config.dtype"),
    "block size": (["--block-size", "512"], "tokens_per_hash"),
    "guessing, which widens a hybrid's state": (
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
        "group.0.parts",
    ),
    "weights by chance": (["--load-format", "dummy"], "load_config.load_format"),
}
"""Arguments that change the bytes of a block, and the fact that names the change."""
QUANTISED = {
    "weights quantised while they are loaded": (
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
        '{"dtype": "int4"}',
    ),
    "activations in int8": ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
    "experts by chance": ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
}
"""Environment variables that change the bytes of a block, and no configuration object."""
ALIKE = {
    "limits": ["--max-num-batched-tokens", "4096", "--max-num-seqs", "3"],
    "length": ["--max-model-len", "8192"],
    "what auto means": ["--model-impl", "vllm", "--kv-cache-dtype", "bfloat16"],
    "adapters": ["--enable-lora", "--max-lora-rank", "8"],
    "seed and name": ["--seed", "7", "--served-model-name", "other"],
}
REFUSED = {
    "other bytes while it runs": (
        ["--weight-transfer-config", '{"backend": "ipc"}'],
        "would leave blocks of the old ones",
    ),
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("engines")
    model, moved = root / "model", root / "elsewhere"
    make_checkpoint(model)
    shutil.copytree(model, moved)
    other = root / "other"
    shutil.copytree(model, other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    asked: dict[str, dict[str, Any]] = {
        "base": {"model": str(model)},
        "moved": {"model": str(moved)},
    }
    asked |= {"weights": {"model": str(other)}, "NHD": {"model": str(model), "layout": "NHD"}}
    asked |= {
        f"blocks of 768 of {size}": {
            "model": str(model),
            "args": ["--block-size", size],
            "tokens": 768,
        }
        for size in ("384", "768")
    }
    asked["blocks of 768"] = {"model": str(model), "args": ["--block-size", "768"]}
    cases = {name: args for name, (args, _) in (ALTERED | REFUSED).items()} | ALIKE
    asked |= {name: {"model": str(model), "args": args} for name, args in cases.items()}
    asked |= {
        name: {"model": str(model), "env": {variable: value}}
        for name, (variable, value) in QUANTISED.items()
    }
    program = Path(__file__).with_name("described.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), json.dumps(list(asked.values()))],
        check=False,
        capture_output=True,
        text=True,
        timeout=580,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answers = json.loads(result.stdout.strip().splitlines()[-1])
    return dict(zip(asked, answers, strict=True))


def what_differs(described: dict[str, Any], name: str) -> list[str]:
    base, other = described["base"], described[name]
    assert "error" not in base, base
    assert "error" not in other, other
    found = differences(base["facts"], other["facts"])
    assert (base["id"] == other["id"]) == (not found)
    return [each.fact for each in found]


@pytest.mark.parametrize(("name", "fact"), [(n, f) for n, (_, f) in ALTERED.items()])
def test_what_changes_the_bytes_changes_the_id_and_has_a_name(
    described: dict[str, Any], name: str, fact: str
) -> None:
    assert fact in what_differs(described, name)[:SHOWN]


def test_combined_blocks_are_those_of_an_engine_with_blocks_of_that_length(
    described: dict[str, Any],
) -> None:
    """Facts, id and bytes; an engine whose own blocks have that length needs no setting."""
    whole = described["blocks of 768"]
    assert "error" not in whole, whole
    for size in ("384", "768"):
        assert described[f"blocks of 768 of {size}"] == whole


@pytest.mark.parametrize(("name", "variable"), [(n, v) for n, (v, _) in QUANTISED.items()])
def test_a_variable_that_changes_the_bytes_changes_the_id_and_has_a_name(
    described: dict[str, Any], name: str, variable: str
) -> None:
    assert what_differs(described, name) == [f"env.{variable}"]


def test_recurrent_state_of_one_size_and_two_types_is_two_layouts(
    described: dict[str, Any],
) -> None:
    """Nothing else differs: before dtypes counted, such engines had one id and shared blocks."""
    one, other = (described[f"state in {dtype}"]["facts"] for dtype in ("float16", "bfloat16"))
    found = differences(one, other)
    assert [each.fact for each in found] == [
        f"group.{number}.{field}" for number in range(3) for field in ("dtypes", "parts")
    ]


@pytest.mark.parametrize("name", ["base", "state in float16", "NHD"])
def test_blocks_have_planes_of_the_types_of_their_layers(
    described: dict[str, Any], name: str
) -> None:
    found = described[name]
    for group, planes in found["planes"].items():
        num_bytes = sum(num_bytes for _, num_bytes in planes)
        assert num_bytes == int(found["facts"][f"group.{group}.block_bytes"])
    state, attention = found["planes"]["0"], found["planes"]["3"]
    assert {dtype for dtype, _ in state} == {
        "bfloat16",
        "float16" if name == "state in float16" else "float32",
    }
    assert [dtype for dtype, _ in attention] == ["bfloat16"]


def test_the_physical_layout_of_the_cache_counts(described: dict[str, Any]) -> None:
    assert what_differs(described, "NHD") == ["cache_config.kv_cache_layout", "group.3.parts"]
    assert described["base"]["facts"]["cache_config.kv_cache_layout"] == "LBHNC"
    assert described["NHD"]["facts"]["cache_config.kv_cache_layout"] == "LBNHC"


def test_one_byte_of_the_weights_counts(described: dict[str, Any]) -> None:
    assert what_differs(described, "weights") == ["model.weights"]


@pytest.mark.parametrize("name", [*ALIKE, "moved"])
def test_what_does_not_change_the_bytes_does_not_change_the_id(
    described: dict[str, Any], name: str
) -> None:
    assert what_differs(described, name) == []


@pytest.mark.parametrize(("name", "words"), [(n, w) for n, (_, w) in REFUSED.items()])
def test_what_can_not_be_known_is_refused(described: dict[str, Any], name: str, words: str) -> None:
    assert words in described[name]["error"]


def test_the_id_is_the_digest_of_the_facts(described: dict[str, Any]) -> None:
    base = described["base"]
    assert facts_id(base["facts"]).hex() == base["id"]
    assert "hash_scheme" not in base["facts"], "ids of engines that run today would change"


def test_facts_hold_no_path_and_are_short(described: dict[str, Any]) -> None:
    base = described["base"]
    assert len(base["facts"]) < 400
    for name, value in base["facts"].items():
        assert len(name) <= 128
        assert len(value) <= 160
        assert not value.startswith(("/", "~"))
        assert "/tmp" not in value  # noqa: S108 (the model lies there)
    assert base["model"] == "model"
