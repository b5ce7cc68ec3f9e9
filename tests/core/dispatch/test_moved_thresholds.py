"""Thresholds of links: moved by requests and loops, held by the operator, never below a block."""

from __future__ import annotations

from prfaas.core.control.threshold_loop import CHANGE_MIN
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
)
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.core.dispatching import MS, costs

FAR, NEAR = "far", "home"
PLANNED = 19_400


def dispatcher(*, moving: bool = False) -> Dispatcher:
    made = Dispatcher(
        LocalCluster("pd", (ClusterMember("h0", NEAR),), None, costs()),
        [RemoteCluster("prfaas", (ClusterMember("f0", FAR),), costs())],
        DispatchSettings(PolicyName.ADAPTIVE, PLANNED, moving_threshold=moving),
    )
    for name in ("h0", "f0"):
        made.set_ready(name, ready=True, now_ns=0)
        made.describe(name, num_tokens_max=10**6, layout_id=b"one")
    made.set_link(FAR, NEAR, up=True)
    made.links.report(FAR, NEAR, LinkReport(0, 1e10, 0, 0, MS))
    return made


def serve(made: Dispatcher, num_tokens: int, start: int, count: int = 400) -> int:
    """Requests of one length that are over at once; the time after them."""
    for i in range(start, start + count):
        made.arrive(Arrival(i, num_tokens, 0), i * NS_PER_S)
        made.requests.end(i, i * NS_PER_S)
    return (start + count) * NS_PER_S


def threshold(made: Dispatcher) -> int:
    return made.links.between(FAR, NEAR).policy.offload_threshold


def test_every_move_is_returned_with_what_it_follows_from() -> None:
    made, now_ns = dispatcher(), 0
    for round_ in range(5):
        now_ns = serve(made, 2000, 400 * round_)
        before = threshold(made)
        moves = made.tick(now_ns)
        assert bool(moves) is (threshold(made) != before)
        for moved in moves:
            assert (moved.before, moved.offload_threshold) == (before, threshold(made))
            assert moved.evidence is not None
            assert moved.evidence.num_requests == min(400 * (round_ + 1), 512)
    assert threshold(made) < PLANNED / 5


def test_small_changes_are_not_made() -> None:
    made = dispatcher()
    serve(made, 2000, 0)
    assert made.tick(NS_PER_S * 400)
    made.arrive(Arrival(400, 2000, 0), NS_PER_S * 400)
    assert not made.tick(NS_PER_S * 400), f"less than {CHANGE_MIN}"


def test_no_loop_moves_it_below_a_block() -> None:
    for moving in (False, True):
        made = dispatcher(moving=moving)
        made.links.least_threshold = 1056
        made.links.between(FAR, NEAR).replan(1100)
        for round_ in range(100):
            now_ns = serve(made, 3000 if round_ % 2 else 20, 50 * round_, 50)
            for busy in range(3):
                made.arrive(Arrival(10**6 + 3 * round_ + busy, 900, 0), now_ns)
            made.tick(now_ns)
            assert threshold(made) >= 1056
    made = dispatcher()
    made.links.least_threshold = 1056
    assert [moved.offload_threshold for moved in made.replan(100)] == [1056]


def test_what_the_operator_set_stays_until_it_is_unset() -> None:
    for moving in (False, True):
        made = dispatcher(moving=moving)
        made.links.hold(30_000)
        for round_ in range(5):
            now_ns = serve(made, 2000, 400 * round_)
            assert not made.tick(now_ns)
            assert not made.replan(5000)
        assert threshold(made) == 30_000
        made.links.hold(None)
        assert threshold(made) == 5000, "the last plan"
        assert not made.links.between(FAR, NEAR).is_held
        assert made.replan(6000)


def test_what_the_operator_set_outlives_a_pool_that_returns_and_is_that_of_new_links() -> None:
    made = dispatcher()
    made.links.hold(30_000)
    made.links.hold(7, made.links.between(FAR, NEAR))
    made.links.forget(FAR)
    made.links.know(FAR, made._routes.remotes["prfaas"])
    assert threshold(made) == 7
    assert made.links.between("new", NEAR).offload_threshold == 30_000
    made.links.hold(None, made.links.between(FAR, NEAR))
    assert threshold(made) == PLANNED
    made.links.forget(FAR)
    assert made.links.between(FAR, NEAR).offload_threshold == PLANNED
    made.links.hold(None)
    assert made.links.between("new", NEAR).offload_threshold == PLANNED
    made.links.hold(8000)
    assert {link.offload_threshold for link in made.links} == {8000}
