"""The map of where prefill-as-a-service pays, its crossovers, and what they rest on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path as File

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fit.picture import svg
from prfaas.cli.plan.plan_command import plan
from prfaas.core.transfer.pacing import WINDOW_BYTES
from prfaas.core.transfer.tcp_goodput import (
    MEASURED,
    CongestionControl,
    TcpEnds,
    TcpPath,
)
from prfaas.errors import ConfigError
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.fit_map.axes import POINTS_MAX, parse_axes
from prfaas.planner.fit_map.make import FitMap, make_map
from prfaas.planner.fit_map.point import (
    PLANNER_ERROR,
    TOLERANCE,
    Doubt,
    Fit,
    PathPlans,
    at,
    crossover,
)
from prfaas.planner.fit_map.view import MARK
from prfaas.planner.problem import Problem
from prfaas.planner.solve import sensitivity
from prfaas.planner.solve.throughput import StageMode
from tests.planner.paths import EXAMPLES
from tests.planner.strategies import problems
from tests.svg_text import misplaced

CASE = EXAMPLES / "paper-case-study.toml"
DENSE = EXAMPLES / "llama-3.3-70b-dense.toml"
BBR, CUBIC = TcpEnds(0), TcpEnds(0, control=CongestionControl.CUBIC)
AXES = parse_axes("1Gbps,2.5Gbps,8Gbps,25Gbps", "2ms,40ms,300ms", "0,0.1%,1%")
SMALL = ("--rtts", "2ms,300ms", "--losses", "0,0.1%", "--lengths", "1", "--bandwidths")


@pytest.fixture(scope="module")
def case_map(case_study: Question) -> FitMap:
    return make_map(case_study, AXES, BBR)


@pytest.fixture(scope="module")
def cubic_map(case_study: Question) -> FitMap:
    return make_map(case_study, replace(AXES, length_factors=(1.0,)), CUBIC)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(plan, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_point_has_the_gain_of_the_plan(case_study: Question) -> None:
    problem = case_study.problem
    link = problem.prfaas[0].link
    point = PathPlans(problem, BBR).point(TcpPath(link.bits_per_s, link.rtt_s))
    assert point.gain == make_plan(case_study).exact.gain
    assert point.fit is Fit.PAYS


def test_a_metro_link_of_25_gbit_pays_for_the_case_study_and_2_5_does_not(
    case_map: FitMap,
) -> None:
    planned = case_map.mixes[1]
    assert planned.points[0.001, 0.002, 25e9].fit is Fit.PAYS
    assert planned.points[0.001, 0.002, 2.5e9].fit is Fit.DOES_NOT_PAY


@pytest.mark.parametrize("name", ["case_map", "cubic_map"])
def test_crossovers_never_fall_with_the_round_trip_nor_the_loss(
    name: str, request: pytest.FixtureRequest
) -> None:
    found: FitMap = request.getfixturevalue(name)
    for mix in found.mixes:
        for (loss, rtt_s), near in mix.crossovers.items():
            for (other_loss, other_rtt_s), far in mix.crossovers.items():
                if other_loss >= loss and other_rtt_s >= rtt_s:
                    assert far.bits_per_s >= near.bits_per_s / (1 + 2 * TOLERANCE)


@pytest.mark.parametrize("name", ["case_map", "cubic_map"])
def test_gains_never_fall_with_bandwidth_nor_rise_with_the_round_trip_or_the_loss(
    name: str, request: pytest.FixtureRequest
) -> None:
    found: FitMap = request.getfixturevalue(name)
    for mix in found.mixes:
        for (loss, rtt_s, bits_per_s), point in mix.points.items():
            for (other_loss, other_rtt_s, other_bits), worse in mix.points.items():
                if other_loss >= loss and other_rtt_s >= rtt_s and other_bits <= bits_per_s:
                    assert worse.gain <= point.gain + 1e-9


@settings(max_examples=8, deadline=None)
@given(problems(), st.floats(1e8, 1e11), st.floats(1.1, 50))
def test_a_free_link_of_any_plan_gains_with_bandwidth(
    problem: Problem, bits_per_s: float, more: float
) -> None:
    free = tuple(replace(c, link=replace(c.link, price_per_tb=0.0)) for c in problem.prfaas)
    plans = PathPlans(replace(problem, prfaas=free), BBR)
    narrow, wide = (
        plans.gain(TcpPath(rate, 0.02, 0.001)) for rate in (bits_per_s, bits_per_s * more)
    )
    assert wide >= narrow - 1e-9
    found = at(plans, TcpPath(1.0, 0.02, 0.001)).bits_per_s
    assert not math.isnan(found)
    if 0 < found < math.inf:
        assert plans.gain(TcpPath(found, 0.02, 0.001)) > 0
        assert plans.gain(TcpPath(found / (1 + 2 * TOLERANCE), 0.02, 0.001)) <= 0


def test_the_crossover_is_the_break_even_bandwidth_of_the_planner(case_study: Question) -> None:
    problem = case_study.problem
    found = crossover(lambda bits: PathPlans(problem, BBR).gain(TcpPath(bits)))
    expected = sensitivity.break_even_bandwidth(problem, StageMode.EXACT)
    assert expected is not None
    assert found.bits_per_s == pytest.approx(expected, rel=2 * TOLERANCE)


def test_a_crossover_may_be_at_any_bandwidth_or_at_none() -> None:
    assert crossover(lambda _: 1.0).text == "any"
    assert crossover(lambda _: 0.0).text == "never"


def test_a_gain_within_the_planners_error_is_not_proven(case_map: FitMap) -> None:
    points = [p for mix in case_map.mixes for p in mix.points.values()]
    near = [p for p in points if abs(p.gain) <= PLANNER_ERROR]
    assert near
    assert {p.doubt for p in near} == {Doubt.ERROR}
    assert all(p.fit is Fit.NOT_PROVEN for p in near)


@pytest.mark.parametrize(
    ("path", "control"),
    [
        (TcpPath(100e9, 2 * MEASURED.rtt_s), CongestionControl.BBR),
        (TcpPath(100e9, 0.01, 2 * MEASURED.loss), CongestionControl.BBR),
        (TcpPath(100e9, 0.01), CongestionControl.CUBIC),
    ],
    ids=["round trip", "loss", "cubic"],
)
def test_a_transport_that_was_never_measured_proves_no_gain(
    case_study: Question, path: TcpPath, control: CongestionControl
) -> None:
    point = PathPlans(case_study.problem, TcpEnds(100, control=control)).point(path)
    assert point.gain > PLANNER_ERROR
    assert (point.fit, point.doubt) == (Fit.NOT_PROVEN, Doubt.TRANSPORT)


def test_a_loss_that_no_transport_mends_is_proven(case_map: FitMap) -> None:
    slow = [p for (_, _, bits), p in case_map.mixes[1].points.items() if bits == 1e9]
    assert {p.fit for p in slow} == {Fit.DOES_NOT_PAY}


def test_a_loss_over_a_far_path_is_proven_where_full_send_buffers_would_not_mend_it(
    case_study: Question,
) -> None:
    far = TcpPath(100e9, 2 * MEASURED.rtt_s)
    assert PathPlans(case_study.problem, TcpEnds(2)).point(far).fit is Fit.DOES_NOT_PAY
    larger = TcpEnds(2, window_bytes=40 * WINDOW_BYTES)
    assert PathPlans(case_study.problem, larger).point(far).fit is Fit.NOT_PROVEN


def test_more_than_a_pool_node_was_seen_to_send_is_not_proven() -> None:
    dense = load_question(DENSE)
    point = PathPlans(dense.problem, TcpEnds(1)).point(TcpPath(400e9, 0.001))
    assert point.doubt is Doubt.TRANSPORT
    assert "from one pool node" in point.reason


def test_prompts_longer_than_any_measured_one_are_not_proven(case_map: FitMap) -> None:
    longer = case_map.mixes[2]
    assert longer.factor == 4
    far = [p for p in longer.points.values() if abs(p.gain) > PLANNER_ERROR]
    assert {p.doubt for p in far} == {Doubt.PROFILE}


def test_a_gain_that_is_bought_with_latency_is_not_proven(case_study: Question) -> None:
    point = PathPlans(case_study.problem, TcpEnds(10_000)).point(TcpPath(100e9, 0.04))
    assert point.fit is Fit.PAYS
    slow = replace(case_study.problem.prfaas[0], prefill=case_study.problem.pd.prefill.scaled(1.6))
    cheap = replace(slow, price_per_gpu_h=0.2)
    point = PathPlans(case_study.problem.with_cluster(0, cheap), BBR).point(TcpPath(100e9, 0.04))
    assert point.gain > PLANNER_ERROR
    assert point.doubt is Doubt.LATENCY


def test_a_demand_above_capacity_does_not_pay_anywhere(case_study: Question) -> None:
    point = PathPlans(case_study.problem, BBR, demand_per_s=100).point(TcpPath(100e9, 0.002))
    assert point.fit is Fit.DOES_NOT_PAY


def test_a_stage_that_few_requests_load_leaves_a_loss_proven(case_study: Question) -> None:
    narrow = TcpPath(20e6, 0.01)
    plans = PathPlans(case_study.problem, BBR)
    assert plans.point(narrow).gain < -0.4
    assert plans.point(narrow).fit is Fit.DOES_NOT_PAY


def test_larger_send_buffers_bring_the_far_crossover_back(case_map: FitMap) -> None:
    far = case_map.moved[-1]
    assert far.path.rtt_s == 0.3
    assert math.isinf(far.base.bits_per_s)
    moved = {mover.what: mover.crossover.bits_per_s for mover in far.movers}
    # Of what the path has, 55 % are left at this round trip and loss.
    larger = moved["TCP buffers of 64 MiB in place of 4 (tcp_wmem, tcp_rmem)"]
    assert larger == pytest.approx(8.4e9 / 0.55, rel=0.02)
    assert math.isinf(moved["twice as many pool nodes"])


def test_half_the_cache_halves_the_crossover(case_map: FitMap) -> None:
    near = case_map.moved[0]
    half = next(m for m in near.movers if m.what.startswith("KV cache half"))
    assert half.ratio == pytest.approx(0.5, rel=0.02)


def test_the_terminal_shows_cells_crossovers_and_movers() -> None:
    output = run(str(CASE), "--map", *SMALL, "1Gbps,25Gbps")
    for text in ("+18%", "-42%", "pays from", "8.4 Gbit/s", "never", "tcp_wmem", "300 ms"):
        assert text in output
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 100


def test_json_has_every_point_and_no_nan() -> None:
    output = run(str(CASE), "--map", "--json", *SMALL, "1Gbps,25Gbps")
    (found,) = json.loads(output, parse_constant=pytest.fail)["maps"]
    (mix,) = found["lengths"]
    assert len(mix["points"]) == 8
    assert {point["fit"] for point in mix["points"]} >= {"pays", "does not pay"}
    assert len(mix["crossovers"]) == 4
    assert [moved["rtt_s"] for moved in found["moved"]] == [0.002, 0.3]


def test_the_text_of_the_picture_fits(case_map: FitMap) -> None:
    long = replace(case_map, title="A title that is as long as a title may be in a plan file " * 2)
    assert misplaced(svg([case_map, long])) == []


def test_a_page_has_what_the_terminal_shows_and_fetches_nothing(tmp_path: File) -> None:
    axes = ("--rtts", "2ms", "--losses", "0.1%", "--lengths", "1", "--bandwidths", "25Gbps")
    run(str(CASE), "--map", *axes, "--report", str(tmp_path / "map.html"))
    text = (tmp_path / "map.html").read_text()
    for shown in (
        "Case study of the Prefill-as-a-Service paper",
        "+18%",
        "pays from",
        "in place of bbr",
    ):
        assert shown in text
    assert "http" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--map", "--rtts", "5"], "--rtts: '5' is not a duration"),
        (["--map", "--losses", "2"], "a loss is below 100 %"),
        (["--map", "--losses", "nan"], "'nan' is not a loss"),
        (["--map", "--bandwidths", "0bps"], "'0bps' carries nothing"),
        (["--map", "--lengths", "0"], "is a number from 0.001 to 1000"),
        (["--map", "--rtts", "5ms,2ms"], "the values have to rise"),
        (["--map", "--rtts", ",".join(f"{n}ms" for n in range(1, 14))], "at most 12 are drawn"),
        (["--map", "--report", "map.png"], "a map is written as .html"),
        (["--map", "--emit"], "leave it or --map out"),
        (["--rtts", "5ms"], "--rtts belongs to --map; add it"),
        ([str(DENSE)], "only --map takes several"),
        (["--map", "--set", "prfaas.0.instances=0"], "a map needs a PrfaaS cluster with instances"),
        (["--map", *[str(DENSE)] * 16], "at most 16 are drawn"),
    ],
)
def test_bad_input_is_refused_in_words(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(str(CASE), *arguments)
    assert message in str(caught.value)


def test_a_map_has_a_limit() -> None:
    values = ",".join(f"{n}ms" for n in range(1, 13))
    with pytest.raises(ConfigError, match=f"at most {POINTS_MAX:,} are planned"):
        parse_axes(rtts=values, lengths="1,2,3,4,5,6,7,8,9,10,11", losses="0,0.1%,0.2%,0.3%,0.4%")


def test_every_answer_has_a_mark() -> None:
    assert set(MARK) == set(Fit)
    assert len(set(MARK.values())) == len(Fit)
