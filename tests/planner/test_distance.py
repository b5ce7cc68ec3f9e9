"""One model of the link: verdict, break-even, map, what-if, gateway and simulation know the
distance and the loss of a path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as File

import pytest

from prfaas.core.transfer.tcp_goodput import CongestionControl, TcpEnds, TcpPath, goodput_bits_per_s
from prfaas.planner.answer.plan import make_plan
from prfaas.planner.answer.plan_loader import Question, load_question
from prfaas.planner.answer.verdict import VerdictAnswer
from prfaas.planner.fit_map.point import PathPlans, at
from prfaas.planner.report.json_report import interactive
from prfaas.planner.solve import sensitivity
from prfaas.planner.solve.designs import split_plans
from prfaas.planner.solve.latency import TransferOverlap, best_operation, service_ttft
from prfaas.planner.solve.throughput import StageMode
from prfaas.sim.scenario.scenario_file import ScenarioFile, ScenarioLinkTable
from prfaas.sim.scenario.setup_builder import make_setup
from prfaas.sim.system.setup import LinkSetup
from prfaas.sim.workloads.make import WorkloadTable
from tests.planner.paths import EXAMPLES

CASE = EXAMPLES / "paper-case-study.toml"
PATHS = {
    "near": ("0ms", 0.0),
    "a country": ("40ms", 0.0),
    "a lossy country": ("40ms", 0.01),
    "half the world": ("200ms", 0.0),
    "and lossy": ("200ms", 0.001),
}
HOSTS = 4  # of 8 GPUs


def question(rtt: str, loss: float, *settings: str) -> Question:
    link = "prfaas.0.link"
    return load_question(CASE, [f'{link}.rtt="{rtt}"', f"{link}.loss={loss}", *settings])


def simulated(asked: Question, **link: object) -> LinkSetup:
    file = ScenarioFile(
        title="x",
        plan="",
        workload=WorkloadTable(rate=1.0),
        link=ScenarioLinkTable(**link),  # type: ignore[arg-type]
    )
    setup, _ = make_setup(file, asked, 131_072)
    return setup.prfaas[0].link


def test_half_the_world_away_it_does_not_pay_at_any_bandwidth() -> None:
    near, far = make_plan(question("2ms", 0.0)), make_plan(question("200ms", 0.0))
    assert near.verdict.answer is VerdictAnswer.PAYS
    assert near.exact.gain == pytest.approx(0.179, abs=0.005)
    assert far.verdict.answer is VerdictAnswer.DOES_NOT_PAY
    assert far.exact.gain == pytest.approx(-0.13, abs=0.01)
    assert near.break_even_bits_per_s == pytest.approx(8.4e9, rel=0.02)
    assert far.break_even_bits_per_s is None
    assert any("never measured" in note for note in far.notes)
    round_trip = next(s for s in far.tornado if s.what.endswith("round trip"))
    assert round_trip.low > far.exact.gain > round_trip.high


@pytest.mark.parametrize("name", PATHS)
def test_verdict_map_what_if_gateway_and_simulation_have_one_link(name: str) -> None:
    rtt, loss = PATHS[name]
    asked = question(rtt, loss)
    [cluster] = asked.problem.prfaas
    path = TcpPath(100e9, cluster.link.rtt_s, loss)
    carried = goodput_bits_per_s(path, TcpEnds(HOSTS))
    assert cluster.goodput_bits_per_s == pytest.approx(carried)
    gain = sensitivity.gain(asked.problem, StageMode.EXACT)
    # The map has its own round trips and losses, whatever the plan's.
    plans = PathPlans(question("0ms", 0.0).problem, TcpEnds(0))
    assert plans.gain(path) == pytest.approx(gain)
    assert plans.point(path).goodput_bits_per_s == pytest.approx(carried)
    crossover = at(plans, path).bits_per_s
    even = sensitivity.break_even_bandwidth(asked.problem, StageMode.EXACT)
    assert crossover == (pytest.approx(even, rel=0.02) if even else float("inf"))
    found = interactive(CASE, [f'prfaas.0.link.rtt="{rtt}"', f"prfaas.0.link.loss={loss}"])
    assert found["plan"]["exact"]["gain_at_equal_cost"] == pytest.approx(gain)
    setup = simulated(asked)
    assert setup.bits_per_s == pytest.approx(carried)
    assert setup.planned_bits_per_s == pytest.approx(carried)
    one = goodput_bits_per_s(path, TcpEnds(1))
    assert min(setup.flow_bits_per_s, setup.bits_per_s) == pytest.approx(min(one, carried))


def test_a_scenario_may_have_another_path_and_other_ends_than_the_plan() -> None:
    asked = question("40ms", 0.001)
    for link, path, ends in (
        ({"rtt": "0ms", "loss": 0.0}, TcpPath(100e9), TcpEnds(HOSTS)),
        ({"rtt": "80ms"}, TcpPath(100e9, 0.08, 0.001), TcpEnds(HOSTS)),
        ({"loss": 0.01, "pool_nodes": 2}, TcpPath(100e9, 0.04, 0.01), TcpEnds(2)),
        (
            {"congestion_control": "cubic", "connections": 4},
            TcpPath(100e9, 0.04, 0.001),
            TcpEnds(HOSTS, 4, CongestionControl.CUBIC),
        ),
    ):
        setup = simulated(asked, **link)
        assert setup.bits_per_s == pytest.approx(goodput_bits_per_s(path, ends))


@pytest.mark.parametrize(
    ("setting", "better"),
    [
        ("prfaas.0.link.pool_nodes=16", True),
        ("prfaas.0.link.connections=1", False),
        ('prfaas.0.link.congestion_control="cubic"', False),
        ("prfaas.0.link.loss=0.01", False),
    ],
)
def test_both_ends_and_loss_count(setting: str, better: bool) -> None:
    path = ("200ms", 0.0) if better else ("40ms", 0.001)
    before = question(*path).problem.prfaas[0].goodput_bits_per_s
    after = load_question(
        CASE, [f'prfaas.0.link.rtt="{path[0]}"', f"prfaas.0.link.loss={path[1]}", setting]
    )
    carried = after.problem.prfaas[0].goodput_bits_per_s
    assert carried > 1.5 * before if better else carried < before


def test_more_hosts_bring_more_pool_nodes() -> None:
    [cluster] = question("200ms", 0.0).problem.prfaas
    twice = replace(cluster, num_instances=8)
    assert twice.goodput_bits_per_s == pytest.approx(2 * cluster.goodput_bits_per_s)


def test_one_transfer_is_sent_by_one_pool_node() -> None:
    problem = question("200ms", 0.0).problem
    [cluster] = problem.prfaas
    assert cluster.transfer_bits_per_s == pytest.approx(cluster.goodput_bits_per_s / HOSTS)
    found = best_operation(problem, StageMode.EXACT)
    wide = replace(cluster, link=cluster.link.measured(cluster.goodput_bits_per_s))
    alone = service_ttft(problem, found, TransferOverlap.OVERLAPPED).p99
    assert (
        alone
        > service_ttft(replace(problem, prfaas=(wide,)), found, TransferOverlap.OVERLAPPED).p99
    )


def test_what_gateways_measure_is_what_a_link_carries() -> None:
    """Plans of splits are asked for with a measured rate: the path does not limit it again."""
    problem = question("200ms", 0.0).problem
    [cluster] = problem.prfaas
    wide = replace(problem, prfaas=(replace(cluster, link=cluster.link.measured(100e9)),))
    far, near = split_plans(problem), split_plans(wide)
    for bits_per_s in (cluster.goodput_bits_per_s, 50e9):
        found, other = far(3, bits_per_s, None), near(3, bits_per_s, None)
        assert found is not None
        assert other is not None
        assert found.rate_per_s == pytest.approx(other.rate_per_s, rel=0.1)


def test_an_impossible_path_is_an_error(tmp_path: File) -> None:
    for setting in ("loss=1.0", "loss=-0.1", "pool_nodes=0", "connections=0"):
        with pytest.raises(Exception, match=setting.split("=", maxsplit=1)[0]):
            load_question(CASE, [f"prfaas.0.link.{setting}"])
