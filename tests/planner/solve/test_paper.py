"""Every number of arXiv:2604.15039 that the model has to reproduce.

Printed values are quoted as printed. Values marked [C] are computed from printed ones.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fit.paper_tables import KV_GBPS, LENGTHS
from prfaas.planner.answer.plan import compare
from prfaas.planner.answer.plan_loader import Question
from prfaas.planner.model.kv_geometry import kv_bytes
from prfaas.planner.problem import Problem
from prfaas.planner.solve import designs
from prfaas.planner.solve.latency import service_ttft
from prfaas.planner.solve.search import Bottleneck, at_threshold, optimum
from prfaas.planner.solve.throughput import StageMode, kv_throughput
from prfaas.planner.workload import mean_length

MIB = 2**20
K32 = 2  # column of 32K in table 3
K128 = 3


@pytest.fixture(scope="module")
def problem(case_study: Question) -> Problem:
    return case_study.problem


@pytest.mark.parametrize(
    ("num_tokens", "mib", "prefill_s", "gbps"),
    [
        (1_024, 190.8, 0.44, 3.61),
        (8_192, 308.9, 0.72, 3.59),
        (32_000, 701.3, 1.84, 3.19),
        (130_000, 2316.3, 7.40, 2.62),
    ],
)
def test_table_5(
    problem: Problem, num_tokens: int, mib: float, prefill_s: float, gbps: float
) -> None:
    size = kv_bytes(problem.geometry, num_tokens)
    seconds = problem.prfaas[0].prefill.seconds_at(num_tokens)
    assert round(size / MIB, 1) == mib
    assert round(seconds, 2) == prefill_s
    assert round(kv_throughput(size, seconds) / 1e9, 2) == gbps


@pytest.mark.parametrize(
    ("num_gpus", "model", "column", "printed_gbps", "digits"),
    [
        (512, "MiniMax-M2.5", K32, 3_800, 2),
        (512, "Qwen3-235B", K32, 2_100, 2),
        (512, "Ring-2.5-1T", K32, 170, 2),
        (10_000, "Ring-2.5-1T", K128, 1_800, 2),
    ],
)
def test_scale_of_section_2(
    num_gpus: int, model: str, column: int, printed_gbps: float, digits: int
) -> None:
    # The paper prints two digits, so its rounding is up to 2.5 %: 165.8 is printed as "~170".
    egress = num_gpus / 8 * KV_GBPS[model][column]
    assert float(f"{egress:.{digits}g}") == printed_gbps


@pytest.mark.parametrize(
    ("num_gpus", "model", "column", "gbps"),
    [
        (512, "MiniMax-M2.5", K32, 3_835.5),
        (512, "Qwen3-235B", K32, 2_134.4),
        (512, "Ring-2.5-1T", K32, 165.8),
        (10_000, "Ring-2.5-1T", K128, 1_825.0),
    ],
)
def test_scale_of_section_2_unrounded(num_gpus: int, model: str, column: int, gbps: float) -> None:
    egress = num_gpus / 8 * KV_GBPS[model][column]  # [C]
    assert egress == pytest.approx(gbps, rel=0.001)


@pytest.mark.parametrize(
    ("dense", "hybrid", "ratio"),
    [("MiniMax-M2.5", "MiMo-V2-Flash", 13), ("Qwen3-235B", "Qwen3.5-397B", 4)],
)
def test_ratios_of_table_3(dense: str, hybrid: str, ratio: int) -> None:
    assert round(KV_GBPS[dense][K32] / KV_GBPS[hybrid][K32]) == ratio


def test_workload(problem: Problem) -> None:
    lengths = problem.workload.lengths
    found = at_threshold(problem, StageMode.PAPER, 19_400)
    assert mean_length(lengths) == pytest.approx(27_486, abs=1)  # [C]; printed "~27K"
    assert found.offload_fraction == pytest.approx(0.4957, abs=5e-5)  # [C]; printed 49.6 %
    assert found.mean_long == pytest.approx(45_046, abs=1)  # [C]; printed "~44K" of 1,024
    assert found.mean_short == pytest.approx(10_224, abs=1)  # [C]
    assert lengths.quantiles(np.array([0.9])) == pytest.approx(62_410, abs=1)  # [C]


def test_table_6_prfaas_pd(problem: Problem) -> None:
    found = optimum(problem, StageMode.PAPER)
    assert (found.num_prfaas, found.num_prefill, found.num_decode) == (4, 3, 5)
    assert found.offload_threshold == pytest.approx(19_400, rel=0.02)
    assert found.prfaas_per_s == pytest.approx(1.61, rel=0.01)
    assert found.pd_prefill_per_s == pytest.approx(1.64, rel=0.01)
    assert found.decode_per_s == pytest.approx(3.91, rel=0.01)
    assert found.rate_per_s == pytest.approx(3.24, rel=0.01)
    assert found.offload_fraction == pytest.approx(0.496, abs=0.003)
    assert 12e9 <= found.egress_bits_per_s <= 13e9
    assert found.binding is Bottleneck.PRFAAS_COMPUTE


def test_table_6_homogeneous(problem: Problem) -> None:
    found = designs.equal_gpus(problem, StageMode.PAPER).operation
    assert (found.num_prfaas, found.num_prefill, found.num_decode) == (0, 9, 3)
    assert found.pd_prefill_per_s == pytest.approx(2.11, rel=0.01)
    assert found.decode_per_s == pytest.approx(2.35, rel=0.01)
    assert found.rate_per_s == pytest.approx(2.11, rel=0.01)


def test_table_6_naive_heterogeneous(problem: Problem) -> None:
    found = designs.naive_heterogeneous(problem, StageMode.PAPER).operation
    assert (found.num_prfaas, found.num_prefill, found.num_decode) == (4, 0, 8)
    assert found.prfaas_per_s == pytest.approx(2.45, rel=0.01)
    assert found.decode_per_s == pytest.approx(6.25, rel=0.01)
    assert found.rate_per_s == pytest.approx(2.45, rel=0.01)


@pytest.mark.parametrize(
    ("design", "mean", "p90"),
    [("prfaas", 2.22, 3.51), ("equal_gpus", 4.44, 9.73), ("naive", 1.74, 3.51)],
)
def test_table_6_ttft(problem: Problem, design: str, mean: float, p90: float) -> None:
    # The printed means are expectations over lengths, E[T(L)], not T(E[L]).
    found = getattr(compare(problem, StageMode.PAPER), design).operation
    ttft = service_ttft(problem, found)
    assert ttft.mean == pytest.approx(mean, rel=0.01)
    assert ttft.p90 == pytest.approx(p90, rel=0.01)


def test_gain_at_equal_cost(problem: Problem) -> None:
    comparison = compare(problem, StageMode.PAPER)
    assert comparison.equal_cost.num_gpus == 128  # an H200 costs 2.0 H20
    assert comparison.gain == pytest.approx(0.15, abs=0.01)


def test_exact_expectations(problem: Problem) -> None:
    # [C] T is convex, so the paper's representative lengths overstate capacity.
    found = at_threshold(problem, StageMode.EXACT, 19_400)
    others = compare(problem, StageMode.EXACT)
    assert others.naive is not None
    assert found.rate_per_s == pytest.approx(3.17, rel=0.01)
    assert others.equal_gpus.operation.rate_per_s == pytest.approx(2.02, rel=0.01)
    assert others.naive.operation.rate_per_s == pytest.approx(2.39, rel=0.01)


def test_exact_terms_agree_with_brute_force(problem: Problem) -> None:
    lengths = problem.workload.lengths
    prefill = problem.prfaas[0].prefill
    tokens, weights = lengths.sample()
    brute = float(np.sum(weights * prefill.at(tokens) * (tokens > 19_400)))
    whole = lengths.expectation_up_to(prefill.at, np.array([19_400.0, lengths.high]))
    assert whole[1] - whole[0] == pytest.approx(brute, rel=1e-3)


def test_table_3_of_catalogue_models_gives_plausible_prefill_times() -> None:
    # Φ_kv and our S_kv of five models imply T = S / Φ; at 1K all five are launch-bound, 0.3-0.5 s.
    from prfaas.planner.model.catalogue import find_model
    from prfaas.planner.model.hf_config import geometry_from_config

    keys = {
        "Kimi Linear": "kimi_linear_48b_a3b",
        "MiMo-V2-Flash": "mimo_v2_flash",
        "Qwen3.5-397B": "qwen3_5_397b_a17b",
        "MiniMax-M2.5": "minimax_m2_5",
        "Qwen3-235B": "qwen3_235b_a22b",
    }
    for name, key in keys.items():
        geometry = geometry_from_config(find_model(key).config)
        seconds = [
            kv_bytes(geometry, tokens) * 8 / (gbps * 1e9)
            for tokens, gbps in zip(LENGTHS, KV_GBPS[name], strict=True)
        ]
        assert 0.3 < seconds[0] < 0.5
        assert seconds == sorted(seconds)
