"""The plan's bytes correct themselves by what transfers carry, within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
    Routed,
)
from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.core.routing.calibration import ByteSettings, Calibration, CarriedBytes
from prfaas.core.routing.decision import Path
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.sim.systems import linear_costs

NUM_MIN = ByteSettings().num_min
PLANNED = 1000
"""Bytes of a token by the plan."""
COSTS = linear_costs(local_ns=1_000_000, remote_ns=1000, token_bytes=PLANNED)
PROMPT = 5_000


def observed(ratio: float, times: int = NUM_MIN) -> CarriedBytes:
    """A correction of a plan that is off by a factor."""
    found = CarriedBytes()
    for _ in range(times):
        found.observe(10**9, round(10**9 * ratio))
    return found


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.5, 2.0, 100.0, 1000.0])
def test_a_few_transfers_correct_a_plan_in_both_directions(ratio: float) -> None:
    assert observed(ratio, NUM_MIN - 1).factor == 1.0
    assert observed(ratio).factor == pytest.approx(ratio)


@pytest.mark.parametrize("ratio", [0.85, 1.0, 1.2])
def test_small_differences_correct_nothing(ratio: float) -> None:
    assert observed(ratio, 100).factor == 1.0


def test_short_prompts_whose_last_block_is_not_shipped_weigh_little() -> None:
    found = CarriedBytes()
    for _ in range(100):
        found.observe(10**6, 0)
        found.observe(10**9, 10**9)
    assert found.factor == 1.0


@given(st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 10**15)), max_size=50))
def test_the_factor_stays_within_its_bounds(samples: list[tuple[int, int]]) -> None:
    found = CarriedBytes()
    for planned, carried in samples:
        found.observe(planned, carried)
        assert 1e-4 <= found.factor <= 1e4


def test_a_layout_counts_until_transfers_do() -> None:
    found = CarriedBytes()
    found.expect(10**9, 10**7)
    assert found.factor == pytest.approx(0.01)
    for _ in range(NUM_MIN):
        found.observe(10**9, 5 * 10**9)
    assert found.factor == pytest.approx(5.0)
    found.expect(10**9, 10**7)
    assert found.factor == pytest.approx(5.0)


def test_a_calibration_that_restarts_forgets_what_it_waits_for() -> None:
    found = Calibration()
    before = found.expect(NS_PER_S, 5)
    found.restart(10)
    found.observe(before, 100 * NS_PER_S)
    assert (found.num_samples, found.error_ratio) == (0, 1.0)
    found.observe(found.expect(NS_PER_S, 10), NS_PER_S)
    assert found.num_samples == 1


# Within the dispatcher


def dispatcher(policy: PolicyName = PolicyName.REMOTE) -> Dispatcher:
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("p0", "pd"),), None, COSTS),
        [RemoteCluster("far", (ClusterMember("r0", "far"),), COSTS)],
        DispatchSettings(policy, 1000),
    )
    for name in ("p0", "r0"):
        made.set_ready(name, ready=True, now_ns=0)
    made.set_link("far", "pd", up=True)
    return made


def ship(made: Dispatcher, number: int, ratio: float, *, lands: bool = True) -> Routed:
    """Offload a prompt whose blocks have `ratio` times the bytes of the plan."""
    now_ns = number * 10 * NS_PER_S
    for name in ("p0", "r0"):
        made.report_load(name, now_ns, 0)
    made.links.report("far", "pd", LinkReport(now_ns, 1e9, 0))
    found = made.arrive(Arrival(number, PROMPT, 0, {}), now_ns)
    assert isinstance(found, Routed)
    assert found.decision.path is Path.REMOTE
    carried = round(PROMPT * PLANNED * ratio) if lands else 0
    made.requests.transfer_over(number, now_ns + NS_PER_S, carried)
    made.requests.end(number, now_ns + NS_PER_S)
    return found


@pytest.mark.parametrize("ratio", [0.01, 100.0])
def test_predictions_and_promises_are_of_the_bytes_that_transfers_carried(ratio: float) -> None:
    made = dispatcher()
    first = [ship(made, number, ratio) for number in range(NUM_MIN)][-1]
    assert first.shipped_bytes == PROMPT * PLANNED
    later = ship(made, NUM_MIN, ratio)
    assert later.shipped_bytes == pytest.approx(PROMPT * PLANNED * ratio)
    link_ns, prefill_ns = later.shipped_bytes * 8, COSTS.remote_prefill_ns(PROMPT)
    assert later.decision.predicted_remote_ns == pytest.approx(max(link_ns, prefill_ns), rel=0.2)
    assert made.promised_bytes == 0


def test_transfers_that_do_not_land_correct_nothing() -> None:
    made = dispatcher()
    for number in range(2 * NUM_MIN):
        ship(made, number, 1.0, lands=False)
    assert (made.carried.num_samples, made.carried.factor) == (0, 1.0)


def test_a_layout_corrects_a_plan_that_would_never_offload() -> None:
    """By the plan a prompt takes 40 s on the link, and 5 s locally; by its blocks 0.4 s."""
    made = dispatcher(PolicyName.ADAPTIVE)
    for name in ("p0", "r0"):
        made.report_load(name, 0, 0)
    made.links.report("far", "pd", LinkReport(0, 1e6, 0))
    found = made.arrive(Arrival(1, PROMPT, 0, {}), 0)
    assert isinstance(found, Routed)
    assert found.decision.path is Path.LOCAL
    made.requests.end(1, 0)
    group = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 16 * PLANNED // 100)
    made.expect_bytes(Layout(bytes(32), 16, "", (group,)), 0)
    again = made.arrive(Arrival(2, PROMPT, 0, {}), 0)
    assert isinstance(again, Routed)
    assert again.decision.path is Path.REMOTE
    assert again.shipped_bytes == pytest.approx(PROMPT * PLANNED / 100)


def test_observed_times_of_predictions_for_other_bytes_are_forgotten() -> None:
    made = dispatcher()
    remote = made.calibrations[Path.REMOTE, "far"]
    for _ in range(20):
        remote.observe(remote.expect(NS_PER_S, 0), 50 * NS_PER_S)
    assert remote.is_refuted
    for number in range(NUM_MIN):
        ship(made, number, 0.01)
    assert (remote.is_refuted, remote.factor) == (False, 1.0)
