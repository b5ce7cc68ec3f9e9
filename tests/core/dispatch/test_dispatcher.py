"""The dispatcher: several clusters and links, events out of order, and nothing held at the end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.admission.deadline_admission import AdmissionControl
from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RefusalReason,
    RefusedRequest,
    RemoteCluster,
)
from prfaas.core.routing.decision import Path, Reason
from prfaas.core.routing.policies import Bandwidth, PolicyName
from prfaas.units import NS_PER_S
from tests.core.dispatching import MS, costs, dispatcher, sent


def arrival(number: int = 0, num_tokens: int = 10_000, **fields: Any) -> Arrival:
    plain = Arrival(number, num_tokens, num_tokens, {})
    return plain._replace(**fields)


def test_the_cluster_that_is_predicted_to_be_fastest_is_taken_and_named() -> None:
    made = dispatcher()
    first = sent(made.arrive(arrival(1), 0))
    assert (first.cluster, first.prefill, first.source) == ("fast", "f0", "fast")
    assert first.decision.predicted_remote_ns is not None
    assert sent(made.arrive(arrival(2), 0)).prefill == "f1"
    # Both are busy for a second now, and 10,000 tokens take 2.5 s in the other cluster.
    for number in (3, 4):
        assert sent(made.arrive(arrival(number), 0)).cluster == "fast"
    assert sent(made.arrive(arrival(5), 0)).cluster == "slow"


def test_the_routes_of_a_request_are_returned_to_who_asked_for_them() -> None:
    made = dispatcher()
    first = made.consider(arrival(1), 0)
    made.consider(arrival(2, 10), 0)

    assert [option.cluster.name for option in first.options] == ["slow", "fast"]
    assert first.best.cluster.name == "fast"
    assert sent(made.decide(arrival(1), first, 0)).cluster == "fast"
    assert len(made.requests) == 1


def test_a_cluster_behind_a_dead_link_is_left_out() -> None:
    made = dispatcher(PolicyName.REMOTE)
    assert sent(made.arrive(arrival(1), 0)).cluster == "fast"
    destination = sent(made.arrive(arrival(1), 0)).destination
    assert made.set_link("fast", destination, up=False) == [1]
    other = "home-1" if destination == "home-0" else "home-0"
    made.set_link("fast", other, up=False)
    assert sent(made.arrive(arrival(2), 0)).cluster == "slow"
    for pool in ("home-0", "home-1"):
        made.set_link("slow", pool, up=False)
    found = sent(made.arrive(arrival(3), 0))
    assert (found.cluster, found.decision.reason) == ("pd", Reason.LINK_DOWN)


def test_a_layout_that_differs_bars_and_one_that_is_unknown_is_no_link() -> None:
    made = dispatcher(PolicyName.REMOTE)
    cases = ((b"other", Reason.LAYOUT_MISMATCH), (None, Reason.ENGINE_NOT_CONNECTED))
    for layout_id, reason in cases:
        for name in ("s0", "f0", "f1"):
            made.describe(name, num_tokens_max=10**6, layout_id=layout_id)
        assert sent(made.arrive(arrival(1), 0)).decision.reason is reason


def test_a_cached_prefix_draws_a_request_certain_or_not() -> None:
    held = {"home-1": 8000}
    for request, hit_tokens in ((arrival(1, hits=held), 8000), (arrival(1, hints=held), 0)):
        found = sent(dispatcher(PolicyName.LOCAL).arrive(request, 0))
        assert found.prefill == found.decode == "h1"
        # What is not certain saves no work and changes no length.
        assert found.hit_tokens == hit_tokens
        assert found.decision.num_new_tokens == 10_000 - found.hit_tokens


def at_one_pool(
    policy: PolicyName, *, mixed: bool = True, threshold: int = 1000, **settings: Any
) -> Dispatcher:
    """Two PD instances of one pool, and two PrfaaS instances of another."""
    local = (ClusterMember("h0", "home"), ClusterMember("h1", "home"))
    made = Dispatcher(
        LocalCluster("pd", local, None if mixed else (ClusterMember("d0", "home"),), costs()),
        [
            RemoteCluster(
                "fast", (ClusterMember("f0", "fast"), ClusterMember("f1", "fast")), costs()
            )
        ],
        DispatchSettings(policy, threshold, **settings),
    )
    made.set_link("fast", "home", up=True)
    made.links.report("fast", "home", LinkReport(0, 1e10, 0, 0, MS))
    return made


def test_what_an_instance_holds_itself_draws_a_request_and_saves_its_work() -> None:
    for mixed in (True, False):
        for held in ({"h1": 8000}, {"h1": 8000, "home": 3000}, {"h1": 8000, "home": 8000}):
            made = at_one_pool(PolicyName.LOCAL, mixed=mixed)
            found = sent(made.arrive(arrival(1, hits=held), 0))
            assert (found.prefill, found.hit_tokens, found.facts.pd_hit_tokens) == (
                "h1",
                8000,
                8000,
            )
            # A decode instance finds only what the pool holds.
            assert found.present_tokens == held.get("home", 0)
            assert found.decision.num_new_tokens == 2000
            assert made.load("h1").wait_ns("h1", 0) == 2000 * 300_000


@pytest.mark.parametrize(
    ("policy", "pool", "other", "holder", "token_ns"),
    [
        (PolicyName.LOCAL, "home", "h0", "h1", 300_000),
        (PolicyName.REMOTE, "fast", "f0", "f1", 100_000),
    ],
    ids=["at home", "away"],
)
@pytest.mark.parametrize(
    ("wait_ms", "waits_for_both", "waits_for_own"),
    [(0, True, True), (10, True, True), (100, False, True), (1000, False, False)],
)
def test_what_need_not_be_loaded_is_worth_a_short_wait(
    policy: PolicyName,
    pool: str,
    other: str,
    holder: str,
    token_ns: int,
    wait_ms: int,
    waits_for_both: bool,
    waits_for_own: bool,
) -> None:
    """Blocks that one instance alone holds would be recomputed; those of the pool only loaded."""
    for waits, hits in (
        (waits_for_both, {holder: 8000, pool: 8000}),
        (waits_for_own, {holder: 8000}),
    ):
        made = at_one_pool(policy)
        made.load(holder).dispatch(holder, 9, 0, wait_ms * MS)
        found = sent(made.arrive(arrival(1, hits=hits), 0))
        taker = holder if waits else other
        assert found.prefill == taker
        assert found.hit_tokens == hits.get(taker, hits.get(pool, 0))
        waited = wait_ms * MS if waits else 0
        new = 10_000 - found.hit_tokens
        assert made.load(taker).wait_ns(taker, 0) == waited + new * token_ns


def test_both_predictions_know_what_the_instance_at_home_holds() -> None:
    held = {"h1": 8000, "home": 3000}
    plain, known = (
        sent(at_one_pool(PolicyName.REMOTE).arrive(arrival(1, hits=hits), 0))
        for hits in ({"home": 3000}, held)
    )
    here, there = plain.decision.predicted_local_ns, plain.decision.predicted_remote_ns
    assert known.decision.predicted_local_ns == (here or 0) - 5000 * 300_000
    # What is shipped is what the pool lacks, whatever an instance holds.
    assert known.decision.predicted_remote_ns == there
    assert known.shipped_bytes == plain.shipped_bytes == 7_000_000
    assert known.present_tokens == 3000
    everything = arrival(1, hits={"h1": 9500, "home": 0}, shippable_tokens=9500)
    found = sent(at_one_pool(PolicyName.REMOTE).arrive(everything, 0))
    assert found.decision.reason is Reason.NOTHING_TO_SHIP


def test_both_predictions_know_what_the_instance_away_holds() -> None:
    plain, known = (
        sent(at_one_pool(PolicyName.REMOTE).arrive(arrival(1, hits=hits), 0))
        for hits in ({"fast": 3000, "home": 2000}, {"fast": 3000, "home": 2000, "f1": 8000})
    )
    assert (known.hit_tokens, known.facts.prfaas_hit_tokens, known.facts.pd_hit_tokens) == (
        8000,
        8000,
        2000,
    )
    before, after = plain.decision.predicted_remote_ns, known.decision.predicted_remote_ns
    assert after == (before or 0) - 5000 * 100_000
    assert known.decision.predicted_local_ns == plain.decision.predicted_local_ns
    # What is shipped is what the pool at home lacks, wherever it lies away.
    assert known.shipped_bytes == plain.shipped_bytes == 8_000_000
    assert known.present_tokens == plain.present_tokens == 2000


def test_only_what_a_pool_holds_is_pulled() -> None:
    def pulled(hits: dict[str, int], policy: PolicyName) -> tuple[int, int]:
        made = at_one_pool(policy, pulls=True, bandwidth=Bandwidth.ABUNDANT, threshold=9000)
        for name in ("f0", "f1"):  # a queue away, so that nobody is sent there
            made.load(name).dispatch(name, 9, 0, 10 * NS_PER_S)
        found = sent(made.arrive(arrival(1, hits=hits), 0))
        assert found.decision.path is Path.LOCAL
        return found.decision.pull_tokens, found.shipped_bytes

    for policy in (PolicyName.ADAPTIVE, PolicyName.PAPER):
        assert pulled({"home": 2000, "fast": 8000}, policy) == (6000, 6_000_000)
        assert pulled({"home": 2000, "fast": 5000, "f0": 8000}, policy) == (3000, 3_000_000)
        assert pulled({"home": 2000, "f0": 8000, "f1": 8000}, policy) == (0, 0)


def test_a_pull_that_is_lost_is_work_where_it_was_waited_for() -> None:
    made = at_one_pool(PolicyName.ADAPTIVE, pulls=True, threshold=9000)
    for name in ("f0", "f1"):  # a queue away, so that nobody is sent there
        made.load(name).dispatch(name, 9, 0, 10 * NS_PER_S)
    found = sent(made.arrive(arrival(1, hits={"home": 2000, "fast": 8000}), 0))
    assert (found.pulls, found.facts.pd_hit_tokens, found.hit_tokens) == (True, 2000, 8000)
    assert made.load(found.prefill).wait_ns(found.prefill, 0) == 2000 * 300_000
    assert made.promised_bytes == 6_000_000
    for _ in range(2):
        made.requests.lose_pull(1, 0)
        assert made.load(found.prefill).wait_ns(found.prefill, 0) == 8000 * 300_000
        assert (made.promised_bytes, made.requests.prefills(1)) == (0, found.prefill)
    made.requests.prefilled(1, 0)
    made.requests.lose_pull(1, 0)
    assert made.load(found.prefill).num_jobs(found.prefill) == 0
    # Of others nothing is lost.
    remote = sent(made.arrive(arrival(2, 10**6), 0))
    assert remote.decision.path is Path.REMOTE
    made.requests.lose_pull(2, 0)
    assert made.promised_bytes == remote.shipped_bytes > 0


def test_nothing_is_shipped_that_is_there() -> None:
    made = dispatcher(PolicyName.REMOTE)
    hits = {"home-0": 9500, "home-1": 9500}
    there = arrival(1, hits=hits, shippable_tokens=9500)
    assert sent(made.arrive(there, 0)).decision.reason is Reason.NOTHING_TO_SHIP
    lacking = arrival(2, hits=hits, shippable_tokens=9501)
    assert sent(made.arrive(lacking, 0)).decision.path is Path.REMOTE


def test_what_fell_back_is_work_at_home() -> None:
    made = dispatcher(PolicyName.REMOTE)
    found = sent(made.arrive(arrival(1), 0))
    assert found.decode is not None
    before = made.load(found.decode).wait_ns(found.decode, 0)
    made.requests.fall_back(1, 0)
    assert made.promised_bytes == 0
    assert made.load(found.prefill).wait_ns(found.prefill, 0) == 0
    assert made.load(found.decode).wait_ns(found.decode, 0) == (before or 0) + 3 * NS_PER_S
    made.requests.prefilled(1, NS_PER_S)
    assert made.load(found.decode).wait_ns(found.decode, NS_PER_S) == 0


def test_an_instance_that_was_tried_is_not_tried_again() -> None:
    made = dispatcher(PolicyName.LOCAL)
    first = sent(made.arrive(arrival(1), 0))
    other = sent(made.arrive(arrival(1, avoid=first.prefill), 0, again=True))
    assert {first.prefill, other.prefill} == {"h0", "h1"}
    made.set_ready(other.prefill, ready=False, now_ns=0)
    refused = made.arrive(arrival(1, avoid=first.prefill), 0, again=True)
    assert isinstance(refused, RefusedRequest)
    assert refused.reason is RefusalReason.NO_INSTANCE


KINDS = ("arrive", "again", "prefilled", "fall back", "over", "end", "report", "down", "up", "link")
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, NS_PER_S)), max_size=60
)


@given(steps=STEPS, policy=st.sampled_from(PolicyName), mixed=st.booleans())
def test_whatever_happens_nothing_is_held_once_all_has_ended(
    steps: list[tuple[str, int, int]], policy: PolicyName, mixed: bool
) -> None:
    made, now, names = dispatcher(policy, mixed=mixed), 0, ("h0", "h1", "s0", "f0", "f1")
    for kind, number, after in steps:
        now += after
        match kind:
            case "arrive" | "again":
                made.arrive(arrival(number, 500 * (number + 1)), now, again=kind == "again")
                made.requests.choose_decode(number)
            case "prefilled":
                made.requests.prefilled(number, now)
            case "fall back":
                made.requests.fall_back(number, now)
            case "over":
                made.requests.transfer_over(number, now)
            case "end":
                made.requests.end(number, now)
            case "report":
                made.report_load(names[number % 5], now, number)
            case "down" | "up":
                made.set_ready(names[number % 5], ready=kind == "up", now_ns=now)
            case "link":
                made.set_link("fast", "home-0", up=number % 2 == 0)
        assert made.promised_bytes >= 0
    for number in range(8):
        made.requests.end(number, now)
    assert (len(made.requests), made.promised_bytes) == (0, 0)
    for name in names:
        made.set_ready(name, ready=True, now_ns=now)
        made.report_load(name, now, 0)
        assert made.load(name).wait_ns(name, now) == 0


# Requests that left the route which was predicted


def decoded(made: Dispatcher, number: int, landed_at_ns: int, begun_at_ns: int) -> None:
    made.requests.prefilled(number, landed_at_ns)
    made.requests.begun(number, begun_at_ns, is_streamed=True)


def test_a_request_that_is_routed_again_decodes_like_any_other() -> None:
    waits = []
    for again in (False, True):
        made = at_one_pool(PolicyName.LOCAL, mixed=False)
        for number in (1, 2):
            sent(made.arrive(arrival(number), 0))
        if again:
            sent(made.arrive(arrival(2), 0, again=True))
        decoded(made, 1, 0, NS_PER_S)
        made.requests.end(1, 9 * NS_PER_S)
        decoded(made, 2, 2 * NS_PER_S, 9 * NS_PER_S)
        waits.append(made.requests.decode_wait(9 * NS_PER_S).after(0))
    assert waits == [8 * NS_PER_S] * 2


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("mixed", [True, False])
def test_admission_learns_nothing_of_a_route_that_was_left(
    mixed: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(AdmissionControl, "seen", lambda _, __, ttft_ns: seen.append(ttft_ns))
    for left in ("fall_back", "lose_pull", "again", ""):
        made = at_one_pool(PolicyName.LOCAL, mixed=mixed)
        routed = sent(made.arrive(arrival(1), 0))
        match left if leaves else "":
            case "fall_back":
                made.requests.fall_back(1, 0)
            case "lose_pull":
                made.requests._entries[1].routed = routed._replace(pulled_from="fast")
                made.requests.lose_pull(1, 0)
            case "again":
                sent(made.arrive(arrival(1), 0, again=True))
        decoded(made, 1, NS_PER_S, NS_PER_S)
    assert len(seen) == (1 if leaves else 4)
