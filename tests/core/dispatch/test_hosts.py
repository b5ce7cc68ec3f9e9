"""Hosts of a PD cluster: a prefix on another host is fetched, and decode goes to another host,
where that is predicted to be soonest."""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import Arrival, ClusterMember, DispatchSettings, LocalCluster
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.core.dispatching import MS, costs, sent

HOSTS = ("a", "b", "c")
PROMPT = 10_000
"""Of these 8,000 tokens take 2.4 s to compute, and 8 MB to send."""
HELD = 8_000
NOW = NS_PER_S


def site(*, decoders: tuple[str, ...] = (), plan: bool = True, policy: str = "local") -> Dispatcher:
    """A prefill instance on each host; `decoders` are hosts with an instance that only decodes."""
    prefill = HOSTS[:1] if decoders else HOSTS
    made = Dispatcher(
        LocalCluster(
            "pd",
            tuple(ClusterMember(f"p-{host}", host) for host in prefill),
            tuple(ClusterMember(f"d-{host}", host) for host in decoders) or None,
            costs() if plan else None,
        ),
        [],
        DispatchSettings(PolicyName(policy), 1000),
    )
    for source in HOSTS:
        for destination in HOSTS:
            if source != destination:
                made.set_link(source, destination, up=True)
                measure(made, source, destination, 1e10)
    return made


def measure(made: Dispatcher, source: str, destination: str, bits_per_s: float) -> None:
    made.links.report(source, destination, LinkReport(NOW - MS, bits_per_s, 0, 0, MS))


def arrival(number: int = 0, **hits: int) -> Arrival:
    return Arrival(number, PROMPT, PROMPT, hits=hits, shippable_tokens=PROMPT - 1)


def busy(made: Dispatcher, *hosts: str, number: int = 100) -> None:
    """Each of these hosts has 3 s of prefill to do."""
    for offset, host in enumerate(hosts):
        book = made.load(f"p-{host}")
        book.dispatch(f"p-{host}", number + offset, NOW, 3 * NS_PER_S)


def test_a_free_host_fetches_the_prefix_of_a_busy_one() -> None:
    made = site()
    busy(made, "b")
    found = sent(made.arrive(arrival(b=HELD), NOW))
    assert found.prefill in ("p-a", "p-c")
    assert found.pulls
    assert found.pulls_from_host
    assert (found.source, found.hit_tokens, found.prefill_pool_tokens) == ("b", HELD, 0)
    assert found.pull_link == ("b", found.prefill_pool)
    assert found.destination == found.prefill_pool
    assert found.shipped_bytes == 0, "no link between clusters carries anything"
    link = made.links.between(*found.pull_link)
    assert link.book.promised_bytes == costs().shipped_bytes(HELD, 0)
    made.requests.transfer_over(0, NOW)
    assert made.promised_bytes == 0
    made.requests.end(0, NOW)
    assert made.rooms.taken_bytes == 0


def test_the_host_with_the_prefix_is_taken_if_it_is_as_free() -> None:
    found = sent(site().arrive(arrival(b=HELD), NOW))
    assert (found.prefill, found.source, found.hit_tokens) == ("p-b", "", HELD)


def test_a_short_prefix_of_its_own_is_completed_from_another_host() -> None:
    made = site()
    busy(made, "b", "c")
    found = sent(made.arrive(arrival(a=2000, b=HELD), NOW))
    assert (found.prefill, found.source) == ("p-a", "b")
    assert (found.hit_tokens, found.prefill_pool_tokens) == (HELD, 2000)
    assert made.links.between("b", "a").book.promised_bytes == costs().shipped_bytes(HELD, 2000)


def test_a_prefix_is_computed_where_that_is_faster_than_its_transfer() -> None:
    made = site()
    for destination in ("a", "c"):
        measure(made, "b", destination, 1e6)
    busy(made, "b", number=100)
    busy(made, "b", number=200)
    found = sent(made.arrive(arrival(b=HELD), NOW))
    assert (found.source, found.hit_tokens) == ("", 0)


def test_a_prefix_behind_a_broken_link_comes_from_the_next_holder() -> None:
    made = site()
    busy(made, "b", "c")
    made.set_link("b", "a", up=False)
    found = sent(made.arrive(arrival(b=HELD, c=HELD - 1000), NOW))
    assert (found.prefill, found.source, found.hit_tokens) == ("p-a", "c", HELD - 1000)
    made.set_link("c", "a", up=False)
    found = sent(made.arrive(arrival(1, b=HELD, c=HELD - 1000), NOW))
    assert not found.pulls


def test_without_a_plan_and_without_an_observed_prefill_a_prefix_is_fetched() -> None:
    made = site(plan=False, policy="observed")
    busy(made, "b", "c")
    found = sent(made.arrive(arrival(b=HELD), NOW))
    assert (found.prefill, found.source, found.hit_tokens) == ("p-a", "b", HELD)


def test_a_pull_that_is_lost_leaves_its_prefix_to_the_engine() -> None:
    made = site()
    busy(made, "b", "c")
    found = sent(made.arrive(arrival(b=HELD), NOW))
    before_ns = made.load("p-a").pending_ns("p-a")
    made.requests.lose_pull(0, NOW)
    assert (made.promised_bytes, made.rooms.taken_bytes) == (0, 0)
    assert made.load("p-a").pending_ns("p-a") - before_ns == 300_000 * HELD
    assert found.facts.num_new_tokens == PROMPT - HELD


def test_decode_stays_on_the_host_that_prefilled_while_it_is_not_busier() -> None:
    made = site(decoders=("a", "b"))
    found = sent(made.arrive(arrival(), NOW))
    assert (found.prefill_pool, found.destination, found.changes_host) == ("a", "a", False)
    assert made.requests.choose_decode(0) == "d-a"


def test_decode_goes_to_another_host_once_that_saves_more_than_the_hand_off_takes() -> None:
    made = site(decoders=("a", "b"))
    chosen = []
    for number in range(8):
        found = sent(made.arrive(arrival(number), NOW))
        chosen.append(made.requests.choose_decode(number))
        assert found.destination == str(chosen[-1])[-1]
    assert set(chosen) == {"d-a", "d-b"}
    assert chosen.count("d-a") >= chosen.count("d-b")
    changed = next(number for number, name in enumerate(chosen) if name == "d-b")
    link = made.links.between("a", "b")
    assert link.book.promised_bytes == chosen.count("d-b") * costs().shipped_bytes(PROMPT - 1, 0)
    made.requests.transfer_over(changed, NOW)
    for number in range(8):
        made.requests.end(number, NOW)
    assert (made.promised_bytes, made.rooms.taken_bytes) == (0, 0)


@pytest.mark.parametrize(("bits_per_s", "expected"), [(1e10, "d-b"), (1e7, "d-c")])
def test_decode_goes_where_the_prefix_is_or_where_a_faster_link_leads(
    bits_per_s: float, expected: str
) -> None:
    made = site(decoders=("b", "c"))
    measure(made, "a", "b", bits_per_s)
    found = sent(made.arrive(arrival(a=0, b=9_000), NOW))
    assert made.requests.choose_decode(0) == expected
    assert found.present_tokens == (9_000 if expected == "d-b" else 0)


def test_an_instance_of_another_host_stands_in_for_a_decode_instance_that_is_gone() -> None:
    made = site(decoders=("a", "b"))
    found = sent(made.arrive(arrival(), NOW))
    assert found.destination == "a"
    made.set_ready("d-a", ready=False, now_ns=NOW)
    assert made.requests.choose_decode(0) == "d-b"
    assert sent(made.arrive(arrival(1), NOW)).destination == "b"


def test_of_many_links_those_that_carry_something_are_shown() -> None:
    links = site().links
    everyone = links.busiest(100, {})
    assert len(everyone) == 6
    carried = {("a", "b"): 5, ("b", "c"): 9, ("c", "a"): 0, ("gone", "a"): 99}
    assert [link.source for link in links.busiest(5, carried)] == ["b", "a"]
    assert [link.source for link in links.busiest(1, carried)] == ["b"]
