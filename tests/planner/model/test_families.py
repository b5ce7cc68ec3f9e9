"""Plan files of the families of models: written from their sources, and told apart by the map."""

from __future__ import annotations

import pytest

from benchmarks.fit.families import FAMILIES, Family, file_of, text_of
from prfaas.core.transfer.tcp_goodput import TcpEnds, TcpPath
from prfaas.planner.answer.plan_loader import load_question
from prfaas.planner.fit_map.point import PathPlans, at
from prfaas.planner.model.catalogue import find_model
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import kv_bytes
from tests.planner.paths import EXAMPLES

METRO = TcpPath(1.0, 0.002, 0.001)


def crossover_of(family: Family) -> float:
    problem = load_question(EXAMPLES / "families" / file_of(family)).problem
    return at(PathPlans(problem, TcpEnds(0)), METRO).bits_per_s


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_plan_file_is_written_from_its_sources(family: Family) -> None:
    text = (EXAMPLES / "families" / file_of(family)).read_text()
    assert text == text_of(family), "run: python -m benchmarks.fit.families examples/plan/families"


def test_a_prefill_time_is_the_cache_over_the_measured_kv_throughput() -> None:
    ring = FAMILIES[-1]
    geometry = geometry_from_config(find_model(ring.model).config, name=ring.name)
    problem = load_question(EXAMPLES / "families" / file_of(ring)).problem
    for tokens, gbps in ((1024, 7.27), (8192, 4.47), (32_000, 2.59), (130_000, 1.46)):
        seconds = problem.prfaas[0].prefill.seconds_at(tokens)
        assert kv_bytes(geometry, tokens) * 8 / seconds / 1e9 == pytest.approx(gbps, rel=0.001)


def test_hybrids_pay_over_less_bandwidth_than_dense_attention() -> None:
    dense, _, _, hybrid_3_1, hybrid_7_1 = map(crossover_of, FAMILIES)
    assert hybrid_7_1 < hybrid_3_1 < dense
