"""Hosts of a PrfaaS cluster: a prefix on another host is fetched before a remote prefill.

A local prefill on any PD host fetches it from the host that holds it.
"""

from __future__ import annotations

import pytest

from prfaas.core.dispatch.dispatcher import Dispatcher
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.dispatch.types import (
    Arrival,
    ClusterMember,
    DispatchSettings,
    LocalCluster,
    RemoteCluster,
)
from prfaas.core.routing.decision import Path
from prfaas.core.routing.policies import PolicyName
from prfaas.units import NS_PER_S
from tests.core.dispatching import MS, costs, sent

PD, AWAY = ("a", "b"), ("x", "y")
PROMPT = 10_000
HELD = 8_000
"""Of the prompt; a PrfaaS instance computes it in 0.8 s, and a PD instance in 2.4 s."""
NOW = NS_PER_S


def sites(
    policy: PolicyName = PolicyName.REMOTE, *, pulls: bool = False, roles: bool = False
) -> Dispatcher:
    """Two hosts in each cluster, with an instance each; with roles one PD host decodes."""
    local = [ClusterMember(f"p-{host}", host) for host in PD]
    # With pulls, an instance of either cluster is equally fast.
    remote = costs(300_000 if pulls else 100_000)
    made = Dispatcher(
        LocalCluster(
            "pd",
            (local[0],) if roles else tuple(local),
            (ClusterMember("d-b", "b"),) if roles else None,
            costs(),
        ),
        [
            RemoteCluster(
                "far", tuple(ClusterMember(f"r-{host}", host) for host in AWAY), remote, 80.0
            )
        ],
        DispatchSettings(policy, 1000 if policy is PolicyName.REMOTE else 20_000, pulls=pulls),
    )
    links = [(x, a) for x in AWAY for a in PD] + [AWAY, AWAY[::-1], PD, PD[::-1]]
    for ends in links:
        made.set_link(*ends, up=True)
        made.links.report(*ends, LinkReport(NOW - MS, 1e10, 0, 0, MS))
    return made


def arrival(number: int = 0, **hits: int) -> Arrival:
    return Arrival(number, PROMPT, PROMPT, hits=hits, shippable_tokens=PROMPT - 1)


def busy(made: Dispatcher, name: str, seconds: int = 3) -> None:
    made.load(name).dispatch(name, 100, NOW, seconds * NS_PER_S)


def test_the_prfaas_host_with_the_prefix_is_taken_if_it_is_as_free() -> None:
    found = sent(sites().arrive(arrival(y=HELD), NOW))
    assert (found.prefill, found.source, found.hit_tokens) == ("r-y", "y", HELD)
    assert not found.pulled_from


def test_a_free_prfaas_host_fetches_the_prefix_of_a_busy_one() -> None:
    made = sites()
    busy(made, "r-y")
    found = sent(made.arrive(arrival(y=HELD), NOW))
    assert (found.decision.path, found.prefill, found.source) == (Path.REMOTE, "r-x", "x")
    assert (found.pulled_from, found.pull_link, found.hit_tokens) == ("y", ("y", "x"), HELD)
    assert found.own_tokens == 0
    assert found.facts.prfaas_hit_tokens == HELD
    assert made.load("r-x").pending_ns("r-x") == 100_000 * (PROMPT - HELD)
    within = made.links.between("y", "x")
    across = made.links.between("x", found.destination)
    whole = costs().shipped_bytes(PROMPT, 0)
    assert within.is_in_site
    assert (within.ns_per_byte, within.offload_threshold) == (0.0, None)
    assert (found.shipped_bytes, across.book.promised_bytes) == (whole, whole)
    assert within.book.promised_bytes == costs().shipped_bytes(HELD, 0)
    made.requests.transfer_over(0, NOW, ends=("y", "x"))
    assert (within.book.promised_bytes, across.book.promised_bytes) == (0, whole)
    made.requests.transfer_over(0, NOW, ends=("x", found.destination))
    assert made.promised_bytes == 0
    made.requests.end(0, NOW)
    assert made.rooms.taken_bytes == 0


def test_a_prefix_is_computed_where_that_is_faster_than_a_pull_inside_the_prfaas_site() -> None:
    made = sites()
    made.links.report("y", "x", LinkReport(NOW, 1e6, 0, 0, MS))
    busy(made, "r-y", 30)
    found = sent(made.arrive(arrival(y=HELD), NOW))
    assert (found.prefill, found.pulled_from, found.hit_tokens) == ("r-x", "", 0)


def test_a_link_that_is_down_inside_the_prfaas_site_carries_no_prefix() -> None:
    made = sites()
    made.set_link("y", "x", up=False)
    busy(made, "r-y")
    found = sent(made.arrive(arrival(y=HELD), NOW))
    assert (found.prefill, found.pulled_from) == ("r-x", "")


def test_a_lost_pull_leaves_its_prefix_to_the_prfaas_engine_and_the_hand_off_promised() -> None:
    made = sites()
    busy(made, "r-y")
    found = sent(made.arrive(arrival(y=HELD), NOW))
    made.requests.lose_pull(0, NOW)
    assert made.load("r-x").pending_ns("r-x") == 100_000 * PROMPT
    assert made.promised_bytes == found.shipped_bytes
    made.requests.transfer_over(0, NOW, ends=("y", "x"))
    assert made.promised_bytes == found.shipped_bytes, "the pull was over before"
    made.requests.end(0, NOW)
    assert (made.promised_bytes, made.rooms.taken_bytes) == (0, 0)


def test_links_of_a_prfaas_site_move_no_threshold() -> None:
    made = sites(PolicyName.ADAPTIVE)
    assert made.tick(NOW) == []
    assert {link.offload_threshold for link in made.links if link.is_in_site} == {None}


def test_hosts_that_join_and_leave_are_those_of_their_cluster() -> None:
    made = sites()
    made.add("far", ClusterMember("r-z", "z"))
    made.describe("r-z", num_tokens_max=10**6, layout_id=b"")
    made.set_ready("r-z", ready=True, now_ns=NOW)
    for ends in (("z", "a"), ("z", "b"), ("y", "z")):
        made.set_link(*ends, up=True)
    assert made.links.between("y", "z").is_in_site
    assert not made.links.between("a", "z").is_in_site
    for name in ("r-x", "r-y"):
        busy(made, name, 10)
    found = sent(made.arrive(arrival(y=HELD), NOW))
    assert (found.prefill, found.pulled_from) == ("r-z", "y")
    made.requests.end(0, NOW)
    made.remove("r-z", NOW)
    made.remove_pool("z")
    found = sent(made.arrive(arrival(z=HELD), NOW))
    assert (found.pulled_from, found.hit_tokens) == ("", 0)


@pytest.mark.parametrize("roles", [False, True])
def test_a_local_prefill_pulls_from_the_prfaas_host_that_holds_the_prefix(roles: bool) -> None:
    made = sites(PolicyName.ADAPTIVE, pulls=True, roles=roles)
    found = sent(made.arrive(arrival(y=HELD), NOW))
    assert (found.decision.path, found.decision.pull_tokens) == (Path.LOCAL, HELD)
    assert (found.pulled_from, found.hit_tokens, found.own_tokens) == ("y", HELD, 0)
    assert found.pull_link == ("y", found.prefill_pool)
    assert found.shipped_bytes == costs().shipped_bytes(HELD, 0)
    assert found.changes_host == roles


def test_only_what_the_host_that_prefills_lacks_is_pulled_for_it() -> None:
    made = sites(PolicyName.ADAPTIVE, pulls=True, roles=True)
    found = sent(made.arrive(arrival(a=3000, b=1000, y=HELD), NOW))
    assert (found.prefill_pool, found.destination) == ("a", "b")
    assert found.shipped_bytes == costs().shipped_bytes(HELD, 3000)
    within = made.links.between("a", "b").book
    assert within.promised_bytes == costs().shipped_bytes(PROMPT - 1, 1000)
    assert made.links.between("y", "a").book.promised_bytes == found.shipped_bytes
    made.requests.end(0, NOW)
    assert (made.promised_bytes, made.rooms.taken_bytes) == (0, 0)
