"""Simulated links that code blocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from prfaas.cli.main import cli
from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.codec.gain import BlockCoding, PlannedCoding
from prfaas.core.dispatch.links import LinkReport
from prfaas.errors import ConfigError
from prfaas.sim.resources.shared_link import Flow, Purpose, SharedLink
from prfaas.sim.resources.transport import make_link
from prfaas.sim.results.invariants import check
from prfaas.sim.results.summary import digest, traffic_of
from prfaas.sim.scenario.run import run
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.sim.system.clock import Clock
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import LinkSetup
from prfaas.units import NS_PER_S
from tests.sim.systems import EXAMPLES

AUTO = PlannedCoding(LinkCodec.AUTO)
CODING = BlockCoding(AUTO, "bfloat16", "float32")
GB = 10**9


class Made:
    """A link of 1 GB/s, and when its flows landed, s."""

    def __init__(self, coding: BlockCoding | None, state_bytes: int = 0) -> None:
        self.clock = Clock()
        self.landed: list[float] = []
        setup = LinkSetup(8e9, coding=coding)
        self.link: SharedLink = make_link(self.clock, setup, state_bytes, self._land)

    def _land(self, _flow: Flow) -> None:
        self.landed.append(self.clock.now_ns / NS_PER_S)

    def send(self, num_bytes: int) -> None:
        flow = self.link.open(Request(0, 0, 1, 1), num_bytes)
        self.link.add(flow, num_bytes, last=True)

    def drain(self) -> None:
        self.clock.go()


def test_coded_blocks_take_less_of_the_network() -> None:
    made = Made(CODING)

    made.send(1_330_000_000)
    made.drain()

    assert made.landed == [pytest.approx(1.0)]
    assert made.link.sent_bytes == pytest.approx(GB)
    assert made.link.sent_by_purpose()[Purpose.HANDOFF] == pytest.approx(GB)
    assert made.link.added_bytes == made.link.landed_bytes == 1_330_000_000


def test_state_in_float32_goes_raw() -> None:
    made = Made(CODING, state_bytes=GB)

    made.send(GB + 1_330_000_000)
    made.drain()

    assert made.landed == [pytest.approx(2.0)]


def test_a_link_without_coding_is_the_plain_one() -> None:
    assert type(Made(None).link) is SharedLink


def test_a_gateway_gets_reports_in_bytes_of_blocks() -> None:
    made, reports = Made(CODING), list[LinkReport]()
    for _ in range(8):
        made.send(1_330_000_000)
    made.clock.at(NS_PER_S, lambda _: reports.append(made.link.report(NS_PER_S)))

    made.drain()

    (report,) = reports
    assert report.goodput_bits_per_s == pytest.approx(8e9 * 1.33, rel=0.05)
    assert report.sent_bytes == pytest.approx(1_330_000_000)


def test_the_rule_follows_the_capacity() -> None:
    """A link of 100 Gbit/s sends raw; when a hundredth of it is left, it codes."""
    made = Made(CODING)
    made.link.set_rate(100e9)
    made.send(25 * GB)
    made.clock.at(NS_PER_S, lambda _: made.link.set_rate(8e9))
    made.clock.at(NS_PER_S + 1, made.send, 1_330_000_000)

    made.drain()

    # 12.5 GB in the first second; both share 1 GB/s then, and the second flow has 1 GB to send.
    assert made.landed == [pytest.approx(3.0), pytest.approx(14.5)]


def test_a_cut_link_holds_its_flows() -> None:
    made = Made(CODING)
    made.send(1_330_000_000)
    made.clock.at(NS_PER_S // 2, lambda _: made.link.set_rate(0))
    made.clock.at(5 * NS_PER_S, lambda _: made.link.set_rate(8e9))

    made.drain()

    assert made.landed == [pytest.approx(5.5)]


def scenario(*settings: str) -> Scenario:
    short = ('workload.duration="4min"', 'workload.warmup="30s"')
    return load_scenario(EXAMPLES / "scarce-link.toml", [*short, *settings])


def test_a_scarce_link_that_codes_offloads_more_with_fewer_bytes() -> None:
    raw, coded = run(scenario()), run(scenario('link.codec="auto"'))

    for made in (raw, coded):
        check(made.simulation)
    ratios = []
    for made in (raw, coded):
        (link,) = made.simulation.links
        (traffic,) = traffic_of(made.simulation)
        assert sum(traffic.bytes_by_purpose.values()) == pytest.approx(link.sent_bytes)
        ratios.append(link.added_bytes / link.sent_bytes)
    assert ratios[0] == pytest.approx(1)
    assert 1.15 < ratios[1] < 1.33
    assert coded.results.time_to_first_token["avg"] < raw.results.time_to_first_token["avg"]


def test_a_link_that_is_too_fast_runs_as_a_raw_one() -> None:
    fast = 'link.bandwidth="100Gbps"'

    found = [run(scenario(fast, f'link.codec="{codec}"')) for codec in ("raw", "auto")]

    assert digest(found[0].simulation) == digest(found[1].simulation)


def test_a_scenario_takes_the_codec_of_its_plan() -> None:
    planned = scenario(
        'plan_settings=["prfaas.0.link.codec=\\"auto\\"", "prfaas.0.link.codec_cores=2"]'
    )
    coding = planned.setup.prfaas[0].link.coding
    assert coding is not None
    one = replace(coding, planned=replace(coding.planned, cores=1))

    assert coding.planned.cores == 2
    assert scenario('link.codec="auto"').setup.prfaas[0].link.coding == one
    assert scenario().setup.prfaas[0].link.coding is None


def test_the_output_names_the_coding() -> None:
    arguments = [str(EXAMPLES / "scarce-link.toml"), "--set", 'link.codec="auto"']
    short = ["--set", 'workload.duration="6min"', "--json"]

    found = CliRunner().invoke(cli, ["simulate", *arguments, *short])

    assert found.exit_code == 0, found.output
    assert "attention is coded 1.33:1, state 1.00:1, lossless" in json.dumps(
        json.loads(found.stdout)
    )


def test_classes_of_tenants_share_a_link() -> None:
    made = run(
        scenario(
            'link.codec="auto"',
            "workload.tenants={cheap=1, exact=1}",
            'link.qualities={cheap="fp8+bf16-state"}',
        )
    )
    exact = run(scenario('link.codec="auto"', "workload.tenants={cheap=1, exact=1}"))

    check(made.simulation)
    ratios = []
    for found in (made, exact):
        (link,) = found.simulation.links
        ratios.append(link.added_bytes / link.sent_bytes)
    assert 1.15 < ratios[1] < 1.33
    assert ratios[1] + 0.1 < ratios[0] < 1.98


def test_a_class_whose_codec_is_the_limit_fills_the_lane_and_not_the_network() -> None:
    slow = ('link.codec="auto"', 'link.quality="kivi4"', 'link.quality_rate="2Gbps"')

    made = run(scenario(*slow))

    check(made.simulation)
    planned = made.simulation.setup.prfaas[0].link
    (link,) = made.simulation.links
    assert link.bits_per_s < 0.5 * planned.bits_per_s


def test_lanes_of_a_scenario_limit_a_raw_link() -> None:
    half = scenario("link.lanes=2", 'link.lane_rate="1Gbps"')

    (link,) = run(half).simulation.links

    assert link.bits_per_s == 2e9
    assert link.added_bytes == pytest.approx(link.sent_bytes, rel=0.05)


def test_a_raw_link_cannot_round() -> None:
    with pytest.raises(ConfigError, match="rounds nothing"):
        scenario('link.qualities={cheap="fp8"}')
