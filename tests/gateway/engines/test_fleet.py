"""Facts of all engines that each request needs: found once a change, and always as they are now."""

from __future__ import annotations

import ssl
from random import Random

import pytest

from prfaas.config.addresses import Endpoints
from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.resilience.quarantine import Guards
from prfaas.gateway.admission.engine_slots import Capacity, EngineLimits
from prfaas.gateway.engines.engine import EngineLoad
from prfaas.gateway.engines.engine_client import Engines
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.gateway.routing.dispatcher_setup import Profiles
from tests.instructions import counted

LENGTH, SLOTS = 1000, "4"


class Fleet:
    """The engines of a gateway that is not started."""

    def __init__(self, num_each: int) -> None:
        def cluster(role: str) -> dict[str, object]:
            engines = {
                f"{role}-{n}": {"pool": role, "args": ["--max-num-seqs", SLOTS]}
                for n in range(num_each)
            }
            return {"role": role, "pools": {role: {}}, "engines": engines}

        self.deployment = Deployment.model_validate(
            {
                "model": {"name": "m", "path": "nowhere"},
                "routing": {"offload_threshold": 8000},
                "security": {"identities": "nowhere"},
                "clusters": {"pd": cluster("pd"), "prfaas": cluster("prfaas")},
            }
        )
        clusters = self.deployment.clusters.values()
        names = [name for table in clusters for name in table.engines]
        self.driver = Driver(self.deployment, Profiles(), PrefixIndex())
        guards = Guards(names, self.driver, lambda *_: None)
        endpoints = Endpoints(dict.fromkeys(names, "http://127.0.0.1:1"), {})
        context = ssl.create_default_context()
        self.engines = Engines(self.deployment, endpoints, context, self.driver, guards)
        self.limits = EngineLimits(self.deployment, self.engines, self.driver, {})
        for name in names:
            self.set_ready(name, ready=True)

    def set_ready(self, name: str, *, ready: bool) -> None:
        engine = self.engines.by_name[name]
        engine.is_ready, engine.max_model_len = ready, LENGTH + len(name)
        if ready:
            self.driver.engine_ready(name, engine.max_model_len, 0)
        else:
            self.driver.engine_gone(name, 0)

    def asked(self) -> tuple[object, ...]:
        """Answers that requests need."""
        found = (self.engines.choose(ClusterRole.PD), self.engines.choose(ClusterRole.PRFAAS))
        return *found, self.engines.adapters(), self.engines.num_decoding, self.limits()

    def looked(self) -> tuple[object, ...]:
        """The same, by a look at each engine."""
        engines = list(self.engines.by_name.values())
        takes = [each for each in engines if each.is_ready and self.driver.takes(each.name)]
        local = [each for each in takes if each.role is ClusterRole.PD]
        remote = [each for each in takes if each.role is ClusterRole.PRFAAS]
        firsts = [
            max(each, key=lambda engine: engine.max_model_len, default=None)
            for each in (local, remote)
        ]
        decoders = [each for each in engines if each.role is ClusterRole.PD]
        listed = [e.adapters for e in decoders if e.is_ready] or [e.adapters for e in decoders]
        num_slots = sum(self.limits._limit(engine) for engine in local)
        capacity = Capacity(num_slots, (len(local), len(remote)))
        adapters = frozenset.intersection(*listed)
        return *firsts, adapters, len(decoders), capacity


def test_a_request_does_not_ask_each_engine() -> None:
    found = []
    for num_each in (2, 200):
        fleet = Fleet(num_each)
        fleet.asked()
        found.append(counted(fleet.asked)[1])
    assert found[1] == found[0]


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_those_of_a_look_at_each_engine(seed: int) -> None:
    random, fleet = Random(seed), Fleet(3)
    driver, engines = fleet.driver, fleet.engines
    for _ in range(300):
        name = random.choice(list(engines.by_name))
        engine, yes = engines.by_name[name], random.random() < 0.5
        match random.randrange(8):
            case 0 | 1:
                fleet.set_ready(name, ready=yes)
            case 2:
                driver.set_drained(name, 0, drained=yes)
            case 3:
                driver.set_broken(name, 0, broken=yes)
            case 4:
                driver.set_paused(name, 0, paused=yes)
            case 5:
                driver.set_cluster(random.choice(["pd", "prfaas"]), 0, on=yes)
            case 6:
                driver.set_withheld(name, 0, withheld=yes)
            case _:
                engine.load = EngineLoad(random.randrange(3), random.randrange(5), None, None)
                engine.num_looks += 1
                driver.states.changed.add(name)
        if yes or random.random() < 0.5:
            assert fleet.asked() == fleet.looked()
