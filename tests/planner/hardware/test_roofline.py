from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.hardware.roofline import (
    ModelSize,
    Roofline,
    decode_profile,
    kv_capacity_bytes,
    prefill_flops,
    prefill_profile,
)
from prfaas.planner.model.catalogue import find_accelerator, find_model
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import KvGeometry
from tests.planner.paths import EXAMPLES


def _model(key: str) -> tuple[KvGeometry, ModelSize]:
    found = find_model(key)
    size = ModelSize(found.parameters, found.active_parameters, found.config)
    return geometry_from_config(found.config, name=found.name), size


def _roofline(accelerator: str = "h200", num_gpus: int = 2, efficiency: float = 0.43) -> Roofline:
    return Roofline(find_accelerator(accelerator), num_gpus, "fp8", efficiency, 0.54, 0.0, "test")


def test_operations_of_a_dense_model() -> None:
    geometry, size = _model("llama_3_3_70b")
    tokens = np.array([8192.0])
    linear = 2 * 70.6e9 * 8192
    attention = 80 * 64 * 2 * (128 + 128) * 8192**2 / 2
    assert prefill_flops(geometry, size, tokens)[0] == pytest.approx(linear + attention)


def test_a_window_makes_attention_linear() -> None:
    geometry, size = _model("gpt_oss_120b")
    attention = prefill_flops(geometry, size, np.array([1e5, 2e5])) - 2 * 5.1e9 * np.array(
        [1e5, 2e5]
    )
    full = 18 * 64 * (64 + 64) * np.array([1e5, 2e5]) ** 2
    sliding = attention - full
    assert sliding[1] / sliding[0] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("accelerator", "num_gpus", "num_tokens", "measured_s"),
    [
        # aiconfigurator-core 0.12.0 silicon sample: Llama-3.1-70B, fp8, vLLM, concurrency 4.
        ("h200", 1, 8192, 1.345),
        ("h200", 2, 8192, 0.733),
        ("h100", 2, 8192, 0.738),
    ],
)
def test_roofline_near_silicon(
    accelerator: str, num_gpus: int, num_tokens: int, measured_s: float
) -> None:
    geometry, size = _model("llama_3_3_70b")
    profile = prefill_profile("x", _roofline(accelerator, num_gpus), geometry, size)
    assert profile.seconds_at(num_tokens) == pytest.approx(measured_s, rel=0.1)


def test_decode_reads_weights_once_and_every_cache() -> None:
    geometry, size = _model("llama_3_3_70b")
    profile = decode_profile("x", _roofline(), geometry, size)
    one, many = profile.step_at(1024)[0], profile.step_at(1024)[10]
    # 70.6 GB over 2 x 4.8 TB/s at 54 %; silicon: 13.9 ms at 4 requests.
    assert one == pytest.approx(70.6e9 / (9.6e12 * 0.54), rel=0.01)
    assert many > one
    batch, step = profile.largest_batch(1024, 0.020)
    assert step <= 0.020
    assert batch > 8


def test_a_batch_touches_more_experts_of_a_sparse_model() -> None:
    geometry, size = _model("qwen3_5_397b_a17b")
    profile = decode_profile("x", _roofline("h200", 8), geometry, size)
    steps = profile.step_at(1024)
    assert steps[0] < 0.1 * 397e9 / (8 * 4.8e12 * 0.54) * 1.2
    assert steps[7] / steps[0] > 10


def test_weights_that_do_not_fit_are_refused() -> None:
    geometry, size = _model("deepseek_v3")
    with pytest.raises(ConfigError, match="weights take 671 GB, 2 x NVIDIA H200 SXM have 282 GB"):
        decode_profile("decode", _roofline(), geometry, size)
    assert kv_capacity_bytes(_roofline("h200", 8), size) == pytest.approx(8 * 141e9 * 0.9 - 671e9)


@pytest.mark.parametrize("cluster", ["prfaas", "pd"])
def test_weights_that_leave_no_memory_for_kv_cache_are_refused(cluster: str) -> None:
    # 397 GB of weights; 4 x H100 have 320 GB, 5 x 80 GB = 400 GB are used to 90 %. Without the
    # refusal a negative KV memory made all rates negative, and the PrfaaS cluster was not checked.
    peak = '{accelerator="h100", weights="fp8", prefill_efficiency=0.4, source="a test"}'
    settings = {
        "pd": [f"pd.roofline={peak}", "pd.gpus_per_instance=5"],
        "prfaas": [
            'prfaas=[{name="x", instances=1, gpus_per_instance=5, link={bandwidth="1Gbps"}, '
            f"roofline={peak}}}]"
        ],
    }[cluster]
    with pytest.raises(ConfigError, match="no memory is left for KV cache; take more GPUs"):
        load_question(EXAMPLES / "qwen3.5-397b.toml", settings)


def test_a_decode_step_has_a_fixed_time_as_well() -> None:
    geometry, size = _model("llama_3_3_70b")
    plain = decode_profile("x", _roofline(), geometry, size)
    whole = decode_profile("x", replace(_roofline(), step_overhead_s=0.003), geometry, size)
    assert whole.step_at(1024) == pytest.approx(plain.step_at(1024) + 0.003)
    assert "3 ms a step" in whole.source


def test_a_roofline_in_a_plan_has_an_overhead_of_a_decode_step() -> None:
    # A small model's step was 1.7 ms and less; no engine launches and schedules in that.
    plan = EXAMPLES / "qwen3.5-397b.toml"
    steps = load_question(plan).problem.pd.decode.step_at(1024)
    bare = load_question(plan, ['pd.roofline.step_overhead="0ms"']).problem.pd.decode.step_at(1024)
    assert steps == pytest.approx(bare + 0.003)


def test_int4_weights_read_a_quarter_and_multiply_at_the_bf16_peak() -> None:
    geometry, size = _model("llama_3_3_70b")
    int4, bf16 = (replace(_roofline(), weights=name) for name in ("int4", "bf16"))
    assert int4.weight_bytes(size) / bf16.weight_bytes(size) == pytest.approx(0.2578, abs=1e-4)
    assert int4.flop_per_s == bf16.flop_per_s
    steps = [decode_profile("x", r, geometry, size).step_at(256)[0] for r in (int4, bf16)]
    assert steps[0] / steps[1] == pytest.approx(0.258, abs=0.001)


@pytest.mark.parametrize("efficiency", [0.0, 1.5])
def test_an_impossible_efficiency_is_refused(efficiency: float) -> None:
    with pytest.raises(ConfigError, match="prefill_efficiency is"):
        _roofline(efficiency=efficiency)
