"""`validate` of the classes with state: sound ones pass, and each kind of damage is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prfaas.core.admission.fair_slots import FairSlots
from prfaas.core.admission.quotas import Quota, TenantLimits
from prfaas.core.control.threshold_loop import Balance
from prfaas.core.dispatch.hosts import DestinationMemory
from prfaas.core.dispatch.instance_load import InstanceLoad
from prfaas.core.dispatch.instances import PrefillInstances
from prfaas.core.dispatch.stages import DecodeBook, DecodeFlow
from prfaas.core.dispatch.types import Arrival, ClusterMember
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.membership.machine import Membership
from prfaas.core.membership.members import Listed, Member, MemberKind, Site
from prfaas.core.resilience.budgets import RETRIES, Budget
from prfaas.core.resilience.circuit_breaker import Breaker
from prfaas.core.resilience.quarantine import Quarantine
from prfaas.core.routing.predictions import PathWork
from tests.core.dispatching import dispatcher as two_clusters


def dispatcher() -> Any:
    made = two_clusters()
    made.arrive(Arrival(1, 10_000, 10_000, {}), 0)
    return made


def queues() -> Any:
    made = InstanceLoad(["a", "b"], 10)
    made.dispatch("a", 1, 0, 5)
    return made


def stage() -> Any:
    return PrefillInstances([ClusterMember("a", "pool")], 10)


def decode_book() -> Any:
    made = DecodeBook([ClusterMember("a", "pool")])
    made.choose()
    return made


def flow() -> Any:
    made = DecodeFlow(10)
    made.expect(1)
    made.begun(1, 5)
    return made


def index() -> Any:
    made = PrefixIndex()
    made.begin_snapshot("pool")
    made.add("pool", b"layout", [(0, bytes(31) + bytes([n])) for n in range(20)])
    made.end_snapshot("pool")
    return made


def balance() -> Any:
    made = Balance(1000)
    made.note(PathWork(500, 5, 3, 100))
    made.note(PathWork(900, 9, None, 0))
    return made


def slots() -> Any:
    made = FairSlots({})
    made.ask(1, "a", 2)
    made.ask(2, "b", 1)
    made.start(2)
    return made


def quota() -> Any:
    made = Quota(TenantLimits(requests_per_minute=5))
    made.enter(0)
    return made


def breaker() -> Any:
    made = Breaker()
    made.failed(0)
    return made


def quarantine() -> Any:
    made = Quarantine()
    made.killed(b"prompt", ("engine", 1), 1, 0)
    return made


def membership() -> Any:
    made = Membership(Site({"pd": ("both",)}, "tiny"))
    made.listed("file", [Listed(Member("pool", MemberKind.POOL, "pd", "10.0.0.1:7100"))], 0)
    return made


MADE: dict[str, Callable[[], Any]] = {
    made.__name__: made
    for made in (
        *(dispatcher, queues, stage, decode_book, flow, index, balance, slots, quota, breaker),
        quarantine,
        DestinationMemory,
    )
}
MADE["membership"] = membership
MADE["budget"] = lambda: Budget(RETRIES)


@pytest.fixture
def _validated() -> None:
    """In place of the hook of all tests of the core: what is damaged here stays so."""


@pytest.mark.parametrize("name", MADE)
def test_a_sound_one_passes(name: str) -> None:
    MADE[name]().validate()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("dispatcher", lambda made: made.requests._book_of["h0"].dispatch("h0", 7, 0, 5)),
        ("dispatcher", lambda made: made.requests.instances.num_streaming.update({"x": 1})),
        ("queues", lambda made: made.order.pop()),
        ("queues", lambda made: setattr(made._loads["a"], "work_ns", 4)),
        ("stage", lambda made: made.leave("a")),
        ("stage", lambda made: made.by_pool["pool"].append("b")),
        ("decode_book", lambda made: made._counts.update(a=0)),
        ("flow", lambda made: made._begun_at_ns.update({1: 9, 2: 4})),
        ("index", lambda made: setattr(made, "_live", 0)),
        ("index", lambda made: setattr(made._sets, "num_live", 7)),
        ("index", lambda made: setattr(made._table._slots, "num_taken", 3)),
        ("balance", lambda made: setattr(made, "_remote_ns", 4)),
        ("slots", lambda made: setattr(made, "num_running", 0)),
        ("slots", lambda made: made._pending_tokens.reverse()),
        ("slots", lambda made: made._waiting.clear()),
        ("quota", lambda made: made.leave(2)),
        ("breaker", lambda made: setattr(made, "_num_outcomes", 0)),
        ("quarantine", lambda made: setattr(made, "_window", 0)),
        ("DestinationMemory", lambda made: made._taken.update(pool=5)),
        ("membership", lambda made: made._addresses.clear()),
        ("membership", lambda made: made._waiting.update(pool=None)),
        ("budget", lambda made: setattr(made, "_balance", 1e9)),
    ],
)
def test_damage_is_seen(name: str, damage: Callable[[Any], object]) -> None:
    made = MADE[name]()
    damage(made)

    with pytest.raises(AssertionError, match="does not hold"):
        made.validate()
