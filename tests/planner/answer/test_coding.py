"""Plans of links that code blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from prfaas.cli.plan.plan_command import plan
from prfaas.errors import ConfigError
from prfaas.planner.answer.coding import classes_of
from prfaas.planner.answer.plan import Plan, make_plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.model.catalogue import find_model
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.report.terminal import print_plan
from prfaas.planner.solve import designs
from prfaas.planner.solve.designs import split_plans
from prfaas.planner.solve.throughput import StageMode
from prfaas.presentation import recorded_page
from tests.planner.paths import EXAMPLES

CASE = EXAMPLES / "paper-case-study.toml"
SCARCE = 'prfaas.0.link.bandwidth="5Gbps"'
AUTO = 'prfaas.0.link.codec="auto"'
TOKEN_BYTES, STATE_BYTES = 17280, 173.925 * 2**20


def wire_ratio(found: designs.Design) -> float:
    """Bytes of an offloaded request on the link, for each byte of its blocks."""
    operation = found.operation
    block_bytes = TOKEN_BYTES * operation.mean_long + STATE_BYTES
    offloaded_per_s = operation.rate_per_s * operation.offload_fraction
    return operation.egress_bits_per_s / 8 / offloaded_per_s / block_bytes


def test_attention_shrinks_on_the_link_and_float32_state_does_not() -> None:
    question = load_question(CASE, [SCARCE, AUTO])
    found = designs.prfaas_pd(question.problem, StageMode.EXACT)
    attention = TOKEN_BYTES * found.operation.mean_long

    expected = (attention / 1.33 + STATE_BYTES) / (attention + STATE_BYTES)

    assert wire_ratio(found) == pytest.approx(expected, rel=1e-6)


def test_state_in_bfloat16_shrinks_too() -> None:
    question = load_question(CASE, [SCARCE, AUTO, 'model.state_dtype="bfloat16"'])

    found = designs.prfaas_pd(question.problem, StageMode.EXACT)

    assert wire_ratio(found) == pytest.approx(1 / 1.33)


def test_a_plan_reports_what_coding_changes() -> None:
    plain = make_plan(load_question(CASE, [SCARCE, "prfaas.0.link.price_per_tb=20"]))
    coded = make_plan(load_question(CASE, [SCARCE, "prfaas.0.link.price_per_tb=20", AUTO]))

    assert plain.coding is None
    effect = coded.coding
    assert effect is not None
    before, after = plain.exact.prfaas.operation, coded.exact.prfaas.operation
    assert effect.raw.egress_bits_per_s == before.egress_bits_per_s
    assert effect.raw.offload_threshold == before.offload_threshold
    assert effect.raw.answer is plain.verdict.answer
    assert effect.raw.gain == plain.exact.gain
    assert effect.coded.rate_per_s == after.rate_per_s > before.rate_per_s
    assert effect.coded.price_per_mtoken < effect.raw.price_per_mtoken
    assert effect.coded.traffic_price_per_h < effect.raw.traffic_price_per_h
    assert (effect.links[0].is_coding, effect.quality) == (True, "lossless")
    assert 1.2 < effect.links[0].hand_off_ratio < 1.33


def test_coding_moves_threshold_and_verdict_of_a_scarce_link() -> None:
    narrow = ['prfaas.0.link.bandwidth="10Gbps"', "prfaas.0.link.price_per_tb=1", AUTO]

    effect = make_plan(load_question(CASE, narrow)).coding

    assert effect is not None
    raw, coded = effect.raw, effect.coded
    assert raw.offload_threshold is not None
    assert coded.offload_threshold is not None
    assert coded.offload_threshold < raw.offload_threshold
    assert coded.gain > raw.gain
    assert (raw.answer, coded.answer) == ("depends", "pays")


def test_a_link_that_is_too_fast_for_the_codec_stays_raw() -> None:
    effect = make_plan(load_question(CASE, [AUTO])).coding

    assert effect is not None
    assert effect.raw == effect.coded
    assert not effect.links[0].is_coding
    assert effect.links[0].gain < 1


@pytest.mark.parametrize("dtype", ["fp8", "float16", "float32"])
def test_a_cache_that_no_codec_is_for_changes_nothing(dtype: str) -> None:
    effect = make_plan(load_question(CASE, [SCARCE, AUTO, f'model.kv_dtype="{dtype}"'])).coding

    assert effect is not None
    assert effect.raw == effect.coded
    assert effect.links[0].hand_off_ratio == 1


def test_traffic_is_priced_by_the_bytes_of_each_link() -> None:
    file = EXAMPLES / "two-prfaas-clusters.toml"
    prices = ["prfaas.0.link.price_per_tb=10", "prfaas.1.link.price_per_tb=0"]
    question = load_question(file, [*prices, 'prfaas.1.link.codec="always"'])

    found = designs.prfaas_pd(question.problem, StageMode.EXACT)

    operation = found.operation
    assert sum(operation.traffic_shares) == pytest.approx(1)
    assert operation.traffic_shares[0] > operation.cluster_shares[0]
    priced = designs.terabytes_per_h(operation) * operation.traffic_shares[0] * 10
    assert found.link_price_per_h == pytest.approx(priced)


def test_splits_are_planned_for_the_rate_of_blocks_that_gateways_measure() -> None:
    problem = load_question(CASE, [SCARCE, AUTO]).problem
    coded, raw = split_plans(problem), split_plans(load_question(CASE, [SCARCE]).problem)

    planned, measured = coded(3, 6.2e9, None), raw(3, 5e9, None)

    assert planned is not None
    assert measured is not None
    assert planned.rate_per_s > measured.rate_per_s
    assert planned == coded(3, 6.3e9, None)


def paged(made: Plan) -> str:
    return recorded_page(partial(print_plan, made, is_page=True))


def test_json_terminal_and_page_show_it() -> None:
    arguments = [str(CASE), "--set", SCARCE, "--set", AUTO]

    coding = json.loads(CliRunner().invoke(plan, [*arguments, "--json"]).stdout)["coding"]
    shown = CliRunner().invoke(plan, arguments).output
    page = recorded_page(
        partial(print_plan, make_plan(load_question(CASE, [SCARCE, AUTO])), is_page=True)
    )

    assert coding["quality"] == "lossless"
    assert coding["links"][0]["codec"] == "auto"
    assert coding["coded"]["egress_bits_per_s"] < coding["raw"]["egress_bits_per_s"]
    for output in (shown, page):
        assert "Coding of links, lossless" in output
        assert "codes 1.33:1, the whole hand-off 1.2" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('prfaas.0.link.codec="kivi4"', "codec"),
        ('prfaas.0.link.quality="fp8"', "rounds nothing"),
        ("prfaas.0.link.lanes=0", "lanes"),
        ("prfaas.0.link.codec_ratio=0.5", "codec_ratio"),
        ("prfaas.0.link.codec_ratio=100.0", "codec_ratio"),
        ("prfaas.0.link.codec_cores=0", "codec_cores"),
        ('prfaas.0.link.codec_rate="0Gbps"', "codec_rate"),
        ('model.kv_dtype="bfloat"', "model.kv_dtype is 'bfloat'; it is one of"),
    ],
)
def test_impossible_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_question(CASE, [setting])


def test_cores_of_a_codec_count() -> None:
    question = load_question(CASE, [AUTO, "prfaas.0.link.codec_cores=8"])

    assert question.problem.prfaas[0].coded.is_coding
    one = replace(question.problem.prfaas[0].link.coding, cores=1.0)
    assert not one.of(100e9 / 8).is_coding


def test_a_plan_compares_every_class_of_its_links() -> None:
    settings = [SCARCE, "prfaas.0.link.price_per_tb=1", "prfaas.0.link.lanes=8"]
    classes = make_plan(load_question(CASE, settings), with_classes=True).classes

    assert list(classes) == [
        "raw", "lossless", "fp8", "kivi4", "bf16-state", "fp8+bf16-state", "kivi4+bf16-state",
    ]  # fmt: skip
    raw, lossless, fp8, kivi4 = (classes[name] for name in list(classes)[:4])
    assert raw.rate_per_s < lossless.rate_per_s < fp8.rate_per_s < kivi4.rate_per_s
    assert raw.price_per_mtoken > lossless.price_per_mtoken > fp8.price_per_mtoken
    assert (raw.answer, classes["kivi4+bf16-state"].answer) == ("does not pay", "pays")
    thresholds = [side.offload_threshold for side in (raw, fp8, kivi4)]
    assert thresholds == sorted(thresholds, key=lambda t: -(t or 0))


def test_a_class_of_the_plan_is_that_of_the_comparison() -> None:
    lossy = [SCARCE, AUTO, "prfaas.0.link.lanes=8", 'prfaas.0.link.quality="kivi4"']
    plan_of = make_plan(load_question(CASE, lossy), with_classes=True)

    assert plan_of.coding is not None
    assert plan_of.coding.quality == "kivi4"
    assert plan_of.coding.coded == plan_of.classes["kivi4"]
    assert plan_of.coding.raw == plan_of.classes["raw"]
    assert plan_of.coding.links[0].ratio == pytest.approx(3.2)


def test_latents_have_no_kivi4() -> None:
    latents = geometry_from_config(find_model("deepseek_v3").config, name="deepseek")
    problem = replace(load_question(CASE, []).problem, geometry=latents)

    assert list(classes_of(problem)) == ["raw", "lossless", "fp8"]


def test_lanes_are_a_limit_of_a_raw_link_too() -> None:
    wide = [AUTO.replace("auto", "raw"), "prfaas.0.link.lanes=2"]
    limited = load_question(CASE, [*wide, 'prfaas.0.link.lane_rate="2.5Gbps"']).problem
    scarce = load_question(CASE, [SCARCE]).problem

    found, expected = (designs.prfaas_pd(p, StageMode.EXACT) for p in (limited, scarce))

    assert found.operation.rate_per_s == pytest.approx(expected.operation.rate_per_s)
    assert limited.prfaas[0].wire_bits_per_s == 5e9


def test_terminal_json_and_page_show_the_classes() -> None:
    arguments = [str(CASE), "--set", SCARCE, "--classes"]

    found = json.loads(CliRunner().invoke(plan, [*arguments, "--json"]).stdout)["classes"]
    shown = CliRunner().invoke(plan, arguments).output
    page = recorded_page(
        partial(
            print_plan, make_plan(load_question(CASE, [SCARCE]), with_classes=True), is_page=True
        )
    )

    assert found["fp8"]["egress_bits_per_s"] <= 5e9
    for output in (shown, page):
        assert "Classes of the links" in output
        assert "kivi4+bf16-state" in output
