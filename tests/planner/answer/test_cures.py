"""Questions without an answer: what binds is named, and what it would take."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from prfaas.cli.plan.plan_command import plan
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.sizing.obstacles import cure_of_demand
from tests.planner.paths import EXAMPLES

CASE = EXAMPLES / "paper-case-study.toml"
pytestmark = pytest.mark.timeout(180)


def said(*settings: str) -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    found = CliRunner().invoke(plan, [str(CASE), *words])
    assert found.exit_code == 0, found.exception
    return " ".join(found.output.split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            # This ended in "arrival rate is 0.0 req/s; it has to be above 0".
            ["search.num_prefill=0", "search.threshold=20000"],
            "PD-P prefill sustains nothing, whatever the target: no instance (search.num_prefill) "
            "is left for local prompts of H20 cluster; it takes one",
        ),
        (
            ['pd.kv_capacity="100MiB"'],
            "PD-D decode sustains nothing, whatever the target: a sequence needs 0.666 GB of KV "
            "memory of a decode instance",
        ),
        (
            ['slo.ttft_p90="10ms"'],
            "it would take prefill that is 979 times as fast in H20 cluster",
        ),
        (
            ["workload.arrival_rate=1000000"],
            "a demand of 1,000,000 req/s is above the 3.18 req/s that it sustains; PrfaaS prefill "
            "binds; no fleet of up to 4,096 instances of a cluster carries it; split the demand "
            "over several deployments",
        ),
        (
            # 91 % of 50 req/s have to cross 1 Gbit/s.
            [
                "workload.arrival_rate=50",
                'prfaas.0.link.bandwidth="1Gbps"',
                "search.threshold=5000",
            ],
            "PrfaaS egress binds; no fleet of up to 4,096 instances of a cluster carries it; it "
            "would take a threshold of the planner's choice (leave search.threshold out)",
        ),
    ],
)
def test_what_binds_and_what_it_would_take(settings: list[str], words: str) -> None:
    assert words in said(*settings)


def test_a_demand_above_what_the_link_carries_within_a_target_needs_a_faster_link() -> None:
    settings = ['slo.ttft_p90="6s"', 'prfaas.0.link.bandwidth="500Mbps"']
    problem = load_question(CASE, settings).problem
    # At home the P90 without waiting is 9.73 s: every long prompt has to cross the link.
    found = cure_of_demand(problem, 2.0, instances_max=64)
    assert "links of 50.0 Gbit/s in all" in found
    assert "or a TTFT P90 of 12.00 s" in found
