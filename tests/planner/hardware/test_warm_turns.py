"""A warm turn is charged for attention over its cached prefix: profiles, rooflines and plans."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prfaas.errors import ConfigError
from prfaas.planner.answer.plan_file import ProfileFile
from prfaas.planner.answer.plan_loader import Question, load_question, prefill_from
from prfaas.planner.hardware.fit import ResumedFit, fit_prefill, fit_resumed, profile_toml
from prfaas.planner.hardware.measure import (
    Completion,
    NoPrefixCacheError,
    Prompts,
    measure_prefill,
    measure_resumed,
)
from prfaas.planner.hardware.profiles import PrefillProfile, make_costs
from prfaas.planner.hardware.roofline import (
    ModelSize,
    Roofline,
    attention_tokens,
    attention_tokens_of,
    prefill_flops,
    prefill_profile,
)
from prfaas.planner.model.catalogue import find_accelerator, find_model
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import KvGeometry
from prfaas.planner.solve.throughput import StageMode, stage_terms
from prfaas.planner.workload import EmpiricalLengths, LogNormalLengths, read_trace
from prfaas.sim.sizing import Trial, try_out
from prfaas.toml_tables import read_toml, validated
from tests.planner.paths import EXAMPLES

PREFIX, NEW = 88_600, 2_830
"""A turn of a coding agent."""


def _model(key: str) -> tuple[KvGeometry, ModelSize]:
    found = find_model(key)
    size = ModelSize(found.parameters, found.active_parameters, found.config)
    return geometry_from_config(found.config, name=found.name), size


RATIOS = {
    "llama_3_3_70b": 2.6,
    "deepseek_v3": 6.5,
    "minimax_m2_5": 7.1,
    "deepseek_v3_2": 2.0,  # sparse: 2,048 keys a token, and an indexer over all
    "kimi_linear_48b_a3b": 3.0,
}


def of_catalogue(key: str) -> PrefillProfile:
    """The roofline of a model on 8 H200, without fixed time."""
    geometry, size = _model(key)
    made = Roofline(find_accelerator("h200"), 8, "bf16", 0.5, 0.5, 0.0, "test")
    return prefill_profile(key, made, geometry, size)


def ratio(profile: PrefillProfile, prefix: float = PREFIX, new: float = NEW) -> float:
    warm = profile.after(np.array([prefix]), np.array([new]))[0]
    return float(warm) / profile.seconds_at(new)


@pytest.mark.parametrize("key", RATIOS)
def test_a_roofline_charges_attention_as_the_model_has_it(key: str) -> None:
    assert ratio(of_catalogue(key)) == pytest.approx(RATIOS[key], rel=0.05)


def test_layers_that_see_a_window_or_a_state_cost_the_same_after_any_prefix() -> None:
    geometry, size = _model("gpt_oss_120b")
    windows = replace(geometry, groups=tuple(g for g in geometry.groups if g.window is not None))
    found = prefill_profile(
        "windows",
        Roofline(find_accelerator("h200"), 1, "bf16", 0.5, 0.5, 0.0, "test"),
        windows,
        size,
    )
    assert ratio(found, 50_000, 20_000) == pytest.approx(1, abs=0.01)
    assert ratio(found, 500_000, 20_000) == pytest.approx(1, abs=0.01)


def test_the_papers_hybrid_is_charged_from_its_measured_knots(case_study: Question) -> None:
    assert ratio(case_study.problem.prfaas[0].prefill) == pytest.approx(1.14, abs=0.03)


def test_weights_are_read_once_for_a_short_turn_however_short_its_prefix() -> None:
    geometry, size = _model("llama_3_3_70b")
    made = Roofline(find_accelerator("h200"), 8, "bf16", 0.5, 0.5, 0.01, "test")
    found = prefill_profile("x", made, geometry, size)
    one = found.seconds_at(1)
    assert float(found.after(np.array([64.0]), np.array([16.0]))[0]) == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("key", ["llama_3_3_70b", "deepseek_v3", "qwen3_235b_a22b"])
def test_attention_tokens_are_where_attention_is_half_of_a_token(key: str) -> None:
    geometry, size = _model(key)
    half = float(attention_tokens(geometry, size))
    first, before, after = prefill_flops(geometry, size, np.array([16.0, half, half + 16.0]))
    assert (after - before) / first == pytest.approx(2, rel=0.01)


def test_models_without_full_attention_have_no_such_context() -> None:
    mamba = {
        "model_type": "mamba2",
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
        "vocab_size": 32768,
    }
    assert attention_tokens_of(mamba, "x") == 0


def test_a_config_of_a_dense_model_has_one() -> None:
    """32 layers of 4,096 with MLPs of 14,336: 8.03 G weights, 32 * 32 * 128 * 2 * 2 a pair."""
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    assert attention_tokens_of(llama, "x") == pytest.approx(2 * 7.5e9 / 524_288, rel=0.03)


def quadratic(tokens: float) -> float:
    return 0.05 + 1e-4 * tokens + 1e-9 * tokens**2


LENGTHS = tuple(float(x) for x in np.geomspace(64, 131_072, 60).round())
CURVE = PrefillProfile("x", "", LENGTHS, tuple(quadratic(x) for x in LENGTHS))


def test_tables_of_decisions_are_the_profile(case_study: Question) -> None:
    known = replace(CURVE, prefixes=(8192.0, 65_536.0), resume_seconds=(0.07, 0.2))
    costs = make_costs(
        case_study.problem.geometry,
        known,
        CURVE,
        num_tokens_max=131_072,
        chunk_tokens=8192,
        overlap=True,
    )
    for prefix, new in ((0, 500), (700, 500), (8192, 2000), (40_000, 1), (65_536, 30_000)):
        at = np.array([float(prefix)]), np.array([float(new)])
        for found, profile in (
            (costs.local_prefill_ns(new, prefix), known),
            (costs.remote_prefill_ns(new, prefix), CURVE),
        ):
            assert found / 1e9 == pytest.approx(float(profile.after(*at)[0]), abs=0.0015)


def test_a_measured_resume_is_added_and_goes_on_beyond_the_last_prefix() -> None:
    known = replace(CURVE, prefixes=(10_000.0, 20_000.0), resume_seconds=(0.15, 0.25))
    prefix = np.array([10_000.0, 20_000.0, 30_000.0])
    extra = known.after(prefix, np.full(3, 2000.0)) - CURVE.after(prefix, np.full(3, 2000.0))
    assert extra == pytest.approx([0.15 - 0.05, 0.25 - 0.05, 0.35 - 0.05], abs=1e-3)
    assert known.scaled(2).resume_seconds == (0.3, 0.5)


@pytest.mark.parametrize(
    ("prefixes", "seconds", "message"),
    [
        ((100.0,), (), "as many of one as of the"),
        ((100.0, 100.0), (0.1, 0.1), "have to be above 0 and rise"),
        ((0.0, 10.0), (0.1, 0.1), "have to be above 0 and rise"),
        ((100.0,), (-0.1,), "have to be 0 or more"),
    ],
)
def test_impossible_prefixes_are_errors(
    prefixes: tuple[float, ...], seconds: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CURVE, prefixes=prefixes, resume_seconds=seconds)


# Measuring


class CachingEngine:
    """`quadratic` with a prefix cache in blocks of 16, and 1 µs for each cached token."""

    def __init__(self, *, caches: bool = True, reports: bool = True) -> None:
        self._seen: list[tuple[int, ...]] = []
        self._caches, self._reports = caches, reports

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Completion:
        asked = tuple(prompt)
        hit = 0
        for each in self._seen if self._caches else []:
            equal = next((i for i, ab in enumerate(zip(each, asked)) if ab[0] != ab[1]), len(each))  # noqa: B905
            hit = max(hit, min(equal, len(asked) - 1) // 16 * 16)
        self._seen.append(asked)
        seconds = quadratic(len(asked)) - (quadratic(hit) - 0.05 - 1e-6 * hit if hit else 0)
        return Completion(len(asked), hit if self._reports else None, (seconds,) * num_tokens)

    async def complete_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[Completion]:
        return [await self.complete(prompt, num_tokens) for prompt in prompts]


async def measured(engine: CachingEngine) -> ResumedFit:
    prompts = Prompts(random.Random(1), 500)
    lengths, prefixes, new = [64, 1024, 4096, 8192], (1024, 4096), (128, 1024)
    cold = await measure_prefill(engine, prompts, lengths, 1, lambda _: None)
    rows = await measure_resumed(
        engine, prompts, prefixes=prefixes, new_tokens=new, repeats=1, report=lambda _: None
    )
    fit = fit_prefill(cold)
    found = fit_resumed(fit, [s.x for s in cold], rows, prefixes, new)
    text = profile_toml("a test", cold, fit, found, None, [])
    file = ProfileFile.model_validate(tomllib.loads(text))
    assert file.prefill is not None
    assert tuple(file.prefill.prefixes) == found.prefixes
    assert prefill_from(file.prefill, "x").prefixes == tuple(map(float, found.prefixes))
    return found


@pytest.mark.parametrize("reports", [True, False])
async def test_a_measured_engine_is_predicted_after_a_prefix(reports: bool) -> None:
    found = await measured(CachingEngine(reports=reports))
    assert found.prefixes == (1024, 4096)
    assert found.seconds == pytest.approx([0.05 + 1e-3, 0.05 + 4e-3], abs=2e-3)
    assert found.error_max < 0.02


@pytest.mark.parametrize("reports", [True, False])
async def test_an_engine_without_a_prefix_cache_is_found_out(reports: bool) -> None:
    with pytest.raises(NoPrefixCacheError, match=r"prefix cache.* --prefixes none"):
        await measured(CachingEngine(caches=False, reports=reports))


# Plans


def warm(question: Question, hits: float) -> Question:
    """The case study with longer prompts, as much of them cached that as much is new."""
    problem = question.problem
    lengths = problem.workload.lengths
    assert isinstance(lengths, LogNormalLengths)
    longer = lengths.scaled(1 / (1 - hits)).with_more_hits(hits)
    work = replace(
        problem.workload,
        lengths=longer,
        mean_prompt_tokens=problem.workload.mean_prompt_tokens / (1 - hits),
    )
    pd = replace(problem.pd, prefill=replace(problem.pd.prefill, extrapolate=True))
    clusters = tuple(
        replace(c, prefill=replace(c.prefill, extrapolate=True)) for c in problem.prfaas
    )
    return replace(question, problem=replace(problem, workload=work, pd=pd, prfaas=clusters))


@pytest.mark.parametrize("mode", StageMode)
def test_a_plan_charges_the_prefix_of_what_it_prefills(
    case_study: Question, mode: StageMode
) -> None:
    cold, found = case_study.problem, warm(case_study, 0.5).problem
    assert found.mean_new_tokens == pytest.approx(cold.mean_new_tokens)
    at = np.array([20_000.0])
    before, after = stage_terms(cold, at, mode), stage_terms(found, at, mode)
    assert after.offload_fraction == pytest.approx(before.offload_fraction)
    assert after.prefill_short_s[0] > 1.02 * before.prefill_short_s[0]
    assert after.prefill_long_s[0, 0] > 1.02 * before.prefill_long_s[0, 0]
    # The blocks that the new tokens add are the same.
    assert after.wire_long_bytes == pytest.approx(before.wire_long_bytes)


def test_a_hit_ratio_of_a_plan_file_and_pairs_of_a_trace_have_prefixes(tmp_path: Path) -> None:
    file = EXAMPLES / "paper-case-study.toml"
    settings = ["workload.prefix_hit_ratio=0.75"]
    lengths = load_question(file, settings).problem.workload.lengths
    assert lengths.prefix(np.array([1000.0])) == pytest.approx([3000.0])
    assert lengths.whole_high == pytest.approx(131_072)
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 9, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 1, "input_length": 1300, "output_length": 9, "hash_ids": [1, 2, 4]}\n'
    )
    found = read_trace(trace)
    assert (found.new_tokens, found.cached_tokens) == ((1200, 276), (0, 1024))


def test_observed_lengths_have_the_mean_prefix_of_their_length() -> None:
    found = EmpiricalLengths((10.0, 20.0, 10.0), (100.0, 300.0, 200.0))
    assert found.prefix(np.array([10.0, 20.0])) == pytest.approx([150.0, 300.0])
    assert found.whole_high == 320.0
    more = found.with_more_hits(0.5)
    assert more.lengths == (5.0, 10.0, 5.0)
    assert more.prefixes == (105.0, 310.0, 205.0)
    assert EmpiricalLengths((10.0,)).prefix(np.array([10.0])) == pytest.approx([0.0])
    with pytest.raises(ConfigError, match="1 cached prefixes for 2 prompt lengths"):
        EmpiricalLengths((1.0, 2.0), (1.0,))


def test_a_profile_has_to_reach_the_whole_prompts(case_study: Question) -> None:
    problem = case_study.problem
    pd = replace(problem.pd, prefill=replace(problem.pd.prefill, extrapolate=False))
    for prefix, reaches in ((0.0, True), (100_000.0, True), (200_000.0, False)):
        work = replace(problem.workload, lengths=EmpiricalLengths((2000.0, 3000.0), (prefix,) * 2))
        if reaches:
            replace(problem, workload=work, pd=pd)
            continue
        with pytest.raises(ConfigError, match="the workload's lengths go from 2000 to 203000"):
            replace(problem, workload=work, pd=pd)


def test_a_confirmation_charges_what_the_plan_charges(case_study: Question) -> None:
    """A single prompt after a long prefix takes its warm time in the simulator."""
    problem = case_study.problem
    work = replace(
        problem.workload,
        lengths=EmpiricalLengths((2_800.0, 2_830.0), (88_600.0, 88_600.0)),
        mean_prompt_tokens=91_400.0,
        output_tokens=2.0,
    )
    asked = replace(problem, workload=work)
    trial = Trial(asked, 4, None, 0.005, 60, 1)
    expected = float(work.prefill_s(problem.pd.prefill, np.array([2_815.0]))[0])
    assert expected > 1.1 * problem.pd.prefill.seconds_at(2_815)
    assert try_out(trial).ttft_p90_s == pytest.approx(expected, rel=0.1)


def test_the_example_file_of_a_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        '[prefill]\nsource = "x"\nlengths = [128, 4096]\nseconds = [0.1, 0.5]\n'
        "prefixes = [1024]\nresume_seconds = [0.12]\n"
    )
    table = validated(ProfileFile, read_toml(path), path).prefill
    assert table is not None
    assert prefill_from(table, "x").resume_seconds == (0.12,)
