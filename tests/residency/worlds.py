"""Random deployments with regions, honest and malicious gateways, and where blocks end up.

    python -m tests.residency.worlds 10000

Real are the rules of the file, the dispatchers of gateway and simulator, certificates and
signatures of gateways, and the checks of tickets in pool nodes. Blocks and transfers are a model:
what a pool node does with an accepted or refused ticket is tested over sockets in
`tests/pool/store/test_regions.py`. The regions of each place are read from the drawn values, not
from the footprints of the product.
"""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.config.governance.residency import pool_footprint
from prfaas.core.dispatch.types import Arrival, Routed
from prfaas.core.facts import FactStream
from prfaas.core.kv.shipping import Manifest, manifest_digest
from prfaas.core.routing.calibration import CalibrationSettings
from prfaas.core.routing.decision import Path as Way
from prfaas.core.routing.decision import Reason
from prfaas.core.routing.policies import PolicyName
from prfaas.core.transfer.residency import Residency, frozen
from prfaas.core.transfer.tickets import Ticket, TicketRefusedError
from prfaas.gateway.routing.dispatcher_setup import Profiles, make_dispatcher
from prfaas.pool.tickets.ticket_checks import TicketChecks
from prfaas.sim.engine.dispatch_driver import SimulatedDriver
from prfaas.sim.system.request import Request
from prfaas.sim.system.setup import (
    ClusterSetup,
    DecodeLimits,
    LinkSetup,
    RoutingSetup,
    Setup,
)
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.tickets import TicketOpener, TicketSigner
from tests.parity.rules import COSTS

REGIONS = ("ca", "eu", "us")
NAMED: Manifest = {0: b"n" * 32}
LAYOUT_ID = b"L" * 32
NUM_TOKENS = 5_000
SUBSETS = [frozenset(part) for n in range(1, 4) for part in itertools.combinations(REGIONS, n)]

region = st.sampled_from(REGIONS)
subset = st.sampled_from(SUBSETS)
seldom = st.none() | st.none() | st.none() | region


@dataclass(frozen=True)
class Host:
    """Regions of a pool node's host and of its disk, as drawn; None is the default."""

    region: str | None
    disk_region: str | None


@dataclass(frozen=True)
class Site:
    """A cluster as drawn."""

    region: str
    hosts: tuple[Host, ...]
    tier: str | None
    """Region of a shared tier; "" is that of the cluster, None no tier."""


@dataclass(frozen=True)
class Move:
    """An act of a malicious gateway: it has a prompt computed, or blocks pulled."""

    tenant: int
    source: int
    destination: int
    regions: frozenset[str]
    computes: bool
    has_ticket: bool


@dataclass(frozen=True)
class Drawn:
    """A policy, a topology, requests and moves."""

    pd: Site
    remote: tuple[Site, ...]
    tenants: tuple[frozenset[str] | None, ...]
    requests: tuple[int, ...]
    moves: tuple[Move, ...]
    includes_local: bool
    """Tenants are allowed in the PD cluster, as the file demands."""


hosts = st.lists(st.builds(Host, seldom, seldom), min_size=1, max_size=2).map(tuple)
sites = st.builds(Site, region, hosts, st.none() | st.none() | st.just("") | region)
moves = st.builds(
    Move,
    tenant=st.integers(0, 2),
    source=st.integers(0, 7),
    destination=st.integers(0, 7),
    regions=subset,
    computes=st.booleans(),
    has_ticket=st.booleans() | st.just(True),
)
drawn = st.builds(
    Drawn,
    pd=sites,
    remote=st.lists(sites, min_size=1, max_size=3).map(tuple),
    tenants=st.lists(st.none() | subset, min_size=1, max_size=3).map(tuple),
    requests=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
    moves=st.lists(moves, max_size=6).map(tuple),
    includes_local=st.booleans() | st.just(True),
)


class Authority:
    """An authority, and a gateway for each set of regions that a certificate can name."""

    def __init__(self, local: Path) -> None:
        make_authority(local)
        self.signers = {
            regions: TicketSigner(make_identity(local, _gateway(regions), regions=regions))
            for regions in SUBSETS
        }
        names = frozenset(map(_gateway, SUBSETS))
        self.opener = TicketOpener(identity_in(local, "x").authority, names)


def _gateway(regions: frozenset[str]) -> str:
    return "gateway-" + "-".join(sorted(regions))


@dataclass
class Pool:
    """A pool node: its checks, and the tenants whose blocks it has."""

    name: str
    is_prfaas: bool
    footprint: frozenset[str]
    places: frozenset[str]
    """Regions where its blocks rest or are read, by the drawn values."""
    checks: TicketChecks
    tenants: set[int] = field(default_factory=set)


class World:
    """A deployment with its pools.

    Raises:
        ValidationError: `prfaas check` refuses it.
    """

    def __init__(self, what: Drawn, authority: Authority) -> None:
        self.what, self.authority = what, authority
        self.sites = {"pd": what.pd, **{f"away-{n}": site for n, site in enumerate(what.remote)}}
        homes = _places(what.pd)
        known = frozenset().union(*map(_places, self.sites.values()))
        self.allowed = [
            None
            if regions is None
            else (regions & known or homes) | (homes if what.includes_local else frozenset())
            for regions in what.tenants
        ]
        self.deployment = Deployment.model_validate(self._file())
        self.pools = [
            self._pool(cluster, name)
            for cluster, table in self.deployment.clusters.items()
            for name in table.pools
        ]
        for pool, peer in itertools.permutations(self.pools, 2):
            pool.checks.met(peer.name, peer.footprint)
        self.seen: Counter[str] = Counter()

    def _file(self) -> dict[str, Any]:
        tenants = {
            f"t{n}": {"keys": [f"sha256:{n:064}"]}
            | ({} if regions is None else {"regions": sorted(regions)})
            for n, regions in enumerate(self.allowed)
        }
        return {
            "model": {"name": "m", "path": "m"},
            "routing": {"offload_threshold": 1000, "policy": "remote"},
            "security": {"identities": "."},
            "tenants": tenants,
            "clusters": {name: _table(name, site) for name, site in self.sites.items()},
        }

    def _pool(self, cluster: str, name: str) -> Pool:
        table = self.deployment.clusters[cluster]
        footprint = pool_footprint(table, table.pools[name])
        site = self.sites[cluster]
        host = site.hosts[int(name.rpartition("-")[2])]
        own = {host.region or site.region, host.disk_region or host.region or site.region}
        count = SimpleNamespace(inc=lambda: self.seen.update(refused=1))
        metrics: Any = SimpleNamespace(tickets_refused=SimpleNamespace(labels=lambda **_: count))
        return Pool(
            name,
            table.role is ClusterRole.PRFAAS,
            footprint,
            _places(site) if site.tier is not None else frozenset(own),
            TicketChecks(name, self.authority.opener, metrics, FactStream(), footprint),
        )

    # --- requests ---

    def route(self) -> None:
        """Route the requests by gateway and simulator, and move their blocks as it says."""
        residency = self.deployment.residency
        remote = [name for name in self.sites if name != "pd"]
        profiles = Profiles(COSTS, dict.fromkeys(remote, COSTS), dict.fromkeys(remote, 1e9))
        live = make_dispatcher(
            self.deployment,
            profiles,
            has_roles=False,
            calibration=CalibrationSettings(proven_first=True),
        )
        names = [pool.name for pool in self.pools]
        for ends in itertools.permutations(names, 2):
            live.set_link(*ends, up=True)
        simulated = SimulatedDriver(self._setup())
        signer = self.authority.signers[self.deployment.gateway_regions]
        for number, draw in enumerate(self.what.requests):
            tenant = draw % len(self.allowed)
            arrival = Arrival(number, NUM_TOKENS, 0, shippable_tokens=NUM_TOKENS - 1)
            arrival = arrival._replace(tenant=f"t{tenant}")
            considered = live.consider(arrival, 0)
            found = live.decide(arrival, considered, 0)
            request = Request(number, 0, NUM_TOKENS, 1, (), f"t{tenant}")
            other, candidates = simulated.route(request, 0)
            assert isinstance(found, Routed)
            assert isinstance(other, Routed)
            # The same clusters are excluded, and so the same choice is left.
            barred = [_barred(each.options) for each in (considered, candidates)]
            assert barred[0] == barred[1]
            ways = [(each.decision.path, each.cluster) for each in (found, other)]
            if all(len(site.hosts) == 1 for site in self.sites.values()):
                assert ways[0] == ways[1], ways
            # The simulator has one pool a cluster: loads of several hosts differ.
            assert ways[0][0] is ways[1][0], ways
            assert not any(barred[0].get(cluster) for _, cluster in ways), ways
            self.seen[found.decision.path.value] += 1
            self.seen["excluded"] += any(barred[0].values())
            if found.decision.path is Way.LOCAL:
                self._at(found.prefill_pool).tenants.add(tenant)
            else:
                ends = found.source, found.destination
                regions = residency.allowed(f"t{tenant}")
                move = self._ticket(signer, tenant, ends, regions)
                assert self.transfer(tenant, *ends, move, computes=True)

    def misbehave(self, moves: Sequence[Move], cert: frozenset[str] | None) -> None:
        """Make the moves of malicious gateways.

        Args:
            moves: What they do.
            cert: Regions in the certificate of one gateway for all tenants; None is one of its own
                for each tenant, whose certificate names the regions of that tenant.
        """
        for draw in moves:
            tenant = draw.tenant % len(self.allowed)
            num_pools = len(self.pools)
            source = self.pools[draw.source % num_pools].name
            destination = self.pools[draw.destination % num_pools].name
            if source == destination:
                continue
            regions = cert or self.deployment.residency.allowed(f"t{tenant}")
            signer = self.authority.signers[regions]
            ticket = self._ticket(signer, tenant, (source, destination), draw.regions)
            sealed = ticket if draw.has_ticket else (ticket[0], b"")
            accepted = self.transfer(tenant, source, destination, sealed, computes=draw.computes)
            self.seen["moved" if accepted else "kept from moving"] += 1

    def transfer(
        self,
        tenant: int,
        source: str,
        destination: str,
        sealed: tuple[bytes, bytes],
        *,
        computes: bool,
    ) -> bool:
        """A transfer as pool nodes make it; True if blocks came through.

        Args:
            sealed: The transfer's id and its ticket.
            computes: An engine at the source stores the blocks; else the source has to have them.
        """
        transfer_id, ticket = sealed
        sender, receiver = self._at(source), self._at(destination)
        if computes and not sender.is_prfaas:
            sender.tenants.add(tenant)
        try:
            sender.checks.to_send(
                ticket, NAMED, transfer_id=transfer_id, destination=destination, layout_id=None
            )
            if computes:
                sender.tenants.add(tenant)
            if tenant not in sender.tenants:
                return False
            receiver.checks.to_receive(
                ticket,
                NAMED,
                transfer_id=transfer_id,
                source=source,
                layouts=frozenset(),
                free_bytes=1 << 40,
            )
        except TicketRefusedError:
            return False
        receiver.tenants.add(tenant)
        return True

    def check(self, limit: frozenset[str] | None = None) -> None:
        """No block is where its tenant, or `limit`, excludes it."""
        for pool in self.pools:
            for tenant in pool.tenants:
                allowed = limit or self.allowed[tenant]
                if allowed is not None:
                    assert pool.places <= allowed, (pool.name, tenant, pool.places, allowed)

    def _at(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)

    def _ticket(
        self,
        signer: TicketSigner,
        tenant: int,
        ends: tuple[str, str],
        regions: frozenset[str],
    ) -> tuple[bytes, bytes]:
        transfer_id = next(_IDS).to_bytes(16, "big")
        return transfer_id, signer.seal(
            Ticket(
                transfer_id=transfer_id,
                tenant=f"t{tenant}",
                layout_id=LAYOUT_ID,
                source=ends[0],
                destination=ends[1],
                blocks=manifest_digest(NAMED),
                bytes_max=1,
                expires_at_ns=time.time_ns() + 60 * 10**9,
                regions=regions,
            )
        )

    def _setup(self) -> Setup:
        places = {name: _places(site) for name, site in self.sites.items()}
        limits = {f"t{n}": each for n, each in enumerate(self.allowed) if each is not None}
        return Setup(
            name="pd",
            prfaas=tuple(
                ClusterSetup(name, len(site.hosts), COSTS, LinkSetup(1e9))
                for name, site in self.sites.items()
                if name != "pd"
            ),
            num_prefill=len(self.what.pd.hosts),
            num_decode=0,
            costs=COSTS,
            step_ns=lambda _batch, _context: 1,
            decode=DecodeLimits(1),
            routing=RoutingSetup(
                PolicyName.REMOTE, 1000, residency=Residency(frozen(places), frozen(limits))
            ),
        )


_IDS = itertools.count(1)


def _barred(options: Sequence[Any]) -> dict[str, bool]:
    return {each.cluster.name: each.facts.obstacle is Reason.REGION for each in options}


def _places(site: Site) -> frozenset[str]:
    """Regions of a whole cluster."""
    found = {site.region, *filter(None, [site.tier])}
    for host in site.hosts:
        found |= set(filter(None, (host.region, host.disk_region)))
    return frozenset(found)


def _table(name: str, site: Site) -> dict[str, Any]:
    pools = {f"{name}-{n}": _pool_table(host) for n, host in enumerate(site.hosts)}
    engines = {f"e-{pool}": {"pool": pool, "url": "http://127.0.0.1:1"} for pool in pools}
    table: dict[str, Any] = {
        "role": "pd" if name == "pd" else "prfaas",
        "region": site.region,
        "pools": pools,
        "engines": engines,
    }
    if site.tier is not None:
        store = {"master": "127.0.0.1:1", "keys": "k"}
        table["mooncake"] = store | ({"data_region": site.tier} if site.tier else {})
    return table


def _pool_table(host: Host) -> dict[str, Any]:
    table: dict[str, Any] = {} if host.region is None else {"region": host.region}
    if host.disk_region is not None:
        table |= {"disk": "d", "disk_limit": "1GiB", "disk_region": host.disk_region}
    return table


def play(what: Drawn, authority: Authority) -> Counter[str]:
    """One world with honest requests, and then two kinds of malicious gateways.

    Returns:
        What happened, counted.
    """
    try:
        world = World(what, authority)
    except ValidationError as error:
        if "it can be served nowhere" not in str(error):
            raise
        # Only a tenant that excludes a PD cluster contradicts itself here.
        limits = [each for each in what.tenants if each is not None]
        assert not all(_places(what.pd) <= each for each in limits)
        return Counter({"refused at check": 1})
    world.route()
    world.check()
    world.misbehave(what.moves, None)
    world.check()
    shared = World(what, authority)
    certificate = shared.deployment.gateway_regions
    shared.misbehave(what.moves, certificate)
    shared.check(certificate)
    return world.seen + Counter(worlds=1)


def run(num_worlds: int) -> Counter[str]:
    """Play that many random worlds; what happened, counted."""
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as local:
        authority = Authority(Path(local))

        @settings(
            max_examples=num_worlds,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(drawn)
        def worlds(what: Drawn) -> None:
            seen.update(play(what, authority))

        worlds()
    return seen


if __name__ == "__main__":
    logging.getLogger("prfaas").setLevel(logging.ERROR)
    began = time.monotonic()
    for kind, count in run(int(sys.argv[1])).most_common():
        print(f"{count:8,} {kind}")
    print(f"{time.monotonic() - began:8.0f} s; no block was where its tenant excludes it")
