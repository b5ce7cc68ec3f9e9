"""Three pool nodes of a site that share a budget, and their gateway."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.dispatch.links import LinkBook
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.core.kv.shipping import NamedBlocks, manifest_digest, manifest_of_keys
from prfaas.core.transfer.site_budget import LEASE_NS, Lease, equal_share, idle_share
from prfaas.core.transfer.tickets import Ticket
from prfaas.gateway.loops.ticker import LeaseGiver
from prfaas.gateway.pools.pool_client import PoolSubscription, PoolTiming
from prfaas.gateway.pools.subscription import Subscription
from prfaas.gateway.routing.dispatch_driver import link_report
from prfaas.gateway.routing.transfer_tracker import Transfers
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.pool.store.tier_ports import StoredBlock
from prfaas.pool.tickets.ticket_checks import Grant
from prfaas.units import NS_PER_S
from prfaas.wire.fragments import block_digest
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.base import Message, Ping, Pong
from prfaas.wire.messages.gateway import LinkLease, LinkTelemetry, PoolState, Subscribe
from prfaas.wire.tickets import TicketSigner

from .sites import LAYOUT, LOOPBACK, Peer, Site, subscribe, until

BUDGET = 60_000_000
SENDERS = ("prfaas-a", "prfaas-b", "prfaas-c")
BLOCK_BYTES, NUM_BLOCKS = 256 << 10, 160
LIFETIME_NS = 120 * 10**9
SECONDS = 3.0
"""Time in which bytes are counted."""
SLACK = 1.1
"""Of the budget: what a socket had taken before a limit fell, and the clock of this machine."""


class Gateway:
    """Connections of a gateway to the pool nodes, as `Pools` has them."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    def names(self) -> list[str]:
        return list(self.peers)

    def answered_ns(self, pool: str) -> int:
        answered = [each.at_ns for each in self.peers[pool].messages if isinstance(each, Pong)]
        return answered[-1] if answered and not self.peers[pool].closed else 0

    def telemetry(self) -> Mapping[tuple[str, str], LinkTelemetry]:
        found = {}
        for pool, peer in self.peers.items():
            states = [message for message in peer.messages if isinstance(message, PoolState)]
            for destination, link in (states[-1].telemetry if states else {}).items():
                found[pool, destination] = link
        return found

    def send(self, pool: str, message: Message) -> bool:
        self.peers[pool].channel.send(message)
        return True


@dataclass
class Trunk:
    """The site, the pool node that receives, and the gateway's part."""

    identities: Path
    pd: Site
    senders: dict[str, Site]
    gateway: Gateway = field(default_factory=Gateway)
    giving: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """The gateway connects, and gives out leases."""
        for name, site in self.senders.items():
            self.gateway.peers[name] = await subscribe(site, self.identities)
        pools: Any = self.gateway
        giver = LeaseGiver([(BUDGET, frozenset(SENDERS))], pools)
        self.giving = asyncio.create_task(giver.run())

    def fill(self, name: str) -> None:
        """Give a pool node a transfer that lasts."""
        data = secrets.token_bytes(BLOCK_BYTES)
        keys = [BlockKey(0, secrets.token_bytes(32)) for _ in range(NUM_BLOCKS)]
        named = NamedBlocks(manifest_of_keys(keys))
        transfer = secrets.token_bytes(16)
        ticket = Ticket(
            transfer,
            "t",
            LAYOUT.layout_id,
            name,
            "pd-pool",
            manifest_digest(named.manifest),
            NUM_BLOCKS * BLOCK_BYTES,
            time.time_ns() + LIFETIME_NS,
        )
        sealed = TicketSigner(identity_in(self.identities, "gateway")).seal(ticket)
        link = self.senders[name].node.links["pd-pool"]
        link.open(Grant(ticket, sealed, named, LIFETIME_NS))
        for key in keys:
            digest = block_digest(LAYOUT.layout_id, key, data)
            link.push(transfer, LAYOUT.layout_id, key, StoredBlock(bytearray(data), digest))
        link.finish(transfer)

    def limit(self, name: str) -> int:
        """Rate that a pool node may send now."""
        share = self.senders[name].node.link_room.share
        return share._leases.bits_per_s(time.monotonic_ns())

    def received(self) -> dict[str, float]:
        return {
            name: self.pd.metric("link_wire_bytes_total", peer=name, direction="received")
            for name in SENDERS
        }

    async def count(self) -> dict[str, float]:
        """Bits a second of each pool node, counted where they arrive."""
        before, began = self.received(), time.monotonic()
        await until(lambda: time.monotonic() - began >= SECONDS)
        took, after = time.monotonic() - began, self.received()
        return {name: (after[name] - before[name]) * 8 / took for name in SENDERS}


@pytest.fixture
async def trunk(tmp_path: Path) -> AsyncIterator[Trunk]:
    make_authority(tmp_path)
    for name in (*SENDERS, "pd-pool", "gateway"):
        make_identity(tmp_path, name)

    async def start(name: str, **changes: object) -> Site:
        settings = {
            "name": name,
            "memory_bytes": 256 << 20,
            "listen": (LOOPBACK, 0),
            "socket_path": tmp_path / f"{name}.sock",
            "admin": (LOOPBACK, 0),
            "identity": identity_in(tmp_path, name),
            "peers": {},
            "sources": frozenset(),
            "gateways": frozenset({"gateway"}),
        }
        site = Site(PoolProcessSettings(**(settings | changes)))  # type: ignore[arg-type]
        await site.ready()
        return site

    pd = await start("pd-pool", sources=frozenset(SENDERS))
    peers = {"pd-pool": (LOOPBACK, pd.port)}
    site = {"site_budget": BUDGET, "site": frozenset(SENDERS), "peers": peers}
    senders = {name: await start(name, **site) for name in SENDERS}
    made = Trunk(tmp_path, pd, senders)
    links = [sender.node.links["pd-pool"] for sender in senders.values()]
    await until(lambda: all(link.is_up for link in links))
    yield made
    if made.giving is not None:
        made.giving.cancel()
    for peer in made.gateway.peers.values():
        peer.pinging.cancel()
        peer.channel.close("the test is over")
    for running in (*senders.values(), pd):
        await running.kill()


@pytest.mark.timeout(120)
async def test_busy_pool_nodes_share_the_budget_and_a_killed_one_loses_its_part(
    trunk: Trunk,
) -> None:
    await trunk.begin()
    trunk.fill("prfaas-a")
    trunk.fill("prfaas-b")
    await until(lambda: all(trunk.limit(name) > 0.4 * BUDGET for name in SENDERS[:2]))
    assert trunk.limit("prfaas-c") < 0.1 * BUDGET

    rates = await trunk.count()

    assert sum(rates.values()) <= SLACK * BUDGET
    assert rates["prfaas-a"] == pytest.approx(rates["prfaas-b"], rel=0.25)
    assert rates["prfaas-a"] > 1.15 * equal_share(BUDGET, 3)

    await trunk.senders["prfaas-a"].kill()
    trunk.fill("prfaas-b")
    await until(lambda: trunk.limit("prfaas-b") > 0.8 * BUDGET)
    rates = await trunk.count()
    assert rates["prfaas-a"] == 0
    assert rates["prfaas-b"] <= SLACK * BUDGET
    assert sum(trunk.limit(name) for name in SENDERS[1:]) <= BUDGET


@pytest.mark.timeout(120)
async def test_without_a_gateway_every_pool_node_has_an_equal_share(trunk: Trunk) -> None:
    for name in SENDERS:
        trunk.fill(name)
    equal = equal_share(BUDGET, 3)
    assert {trunk.limit(name) for name in SENDERS} == {equal}
    await until(lambda: min(trunk.received().values()) > BLOCK_BYTES)

    rates = await trunk.count()

    assert sum(rates.values()) <= SLACK * BUDGET
    for rate in rates.values():
        assert rate <= SLACK * equal


@pytest.mark.timeout(60)
async def test_an_idle_link_reports_the_rate_that_it_would_have(trunk: Trunk) -> None:
    """Not the tenth of an equal share that it has while others are busy, also when it is new."""
    node = trunk.senders["prfaas-a"].node
    small = Lease(idle_share(BUDGET, 3), LEASE_NS)
    node.link_room.share.take("gateway", small)

    def reported(peer: str) -> float:
        """Rate by which a gateway routes."""
        book = LinkBook(NS_PER_S)
        book.report(link_report(node.links[peer].telemetry, time.monotonic_ns()))
        return book.bits_per_s

    assert reported("pd-pool") == equal_share(BUDGET, 3)

    node.peers.add("pd-pool-2", (LOOPBACK, trunk.pd.port))
    assert reported("pd-pool-2") == equal_share(BUDGET, 3) - small.bits_per_s // 2


@pytest.mark.timeout(60)
async def test_a_link_keeps_to_the_budget_that_it_came_with(trunk: Trunk) -> None:
    """As the links of contracts and members do: the settings of the pool node have none."""
    node = trunk.senders["prfaas-a"].node
    node.peers.remove("pd-pool")
    node.peers.add("pd-pool", (LOOPBACK, trunk.pd.port), BUDGET // 10)
    node.link_room.share.take("gateway", Lease(BUDGET, LEASE_NS))

    assert node.links["pd-pool"].telemetry.budget_bits_per_s == BUDGET // 10


@pytest.mark.timeout(60)
async def test_a_gateway_knows_which_ping_a_pool_node_answered(trunk: Trunk) -> None:
    """Over the gateway's own connection, while a link of the pool node is in use."""
    index = PrefixIndex()
    followed = Subscription("prfaas-a", index, Transfers())
    address = LOOPBACK, trunk.senders["prfaas-a"].port
    tls = identity_in(trunk.identities, "gateway").client_context()
    client = PoolSubscription(
        "prfaas-a", address, Subscribe(gateway="gateway"), tls, followed, PoolTiming()
    )
    running = asyncio.create_task(client.run())
    await until(lambda: followed.is_live)
    assert client.answered_ns == 0

    for at_ns in (5, 7):
        client.send(LinkLease(bits_per_s=BUDGET, for_ns=LEASE_NS))
        client.send(Ping(at_ns=at_ns))
        await until(lambda at_ns=at_ns: client.answered_ns == at_ns)  # type: ignore[misc]

        assert trunk.limit("prfaas-a") == BUDGET

    running.cancel()
    await asyncio.wait({running})


@pytest.mark.timeout(120)
async def test_leases_run_out_when_the_gateway_is_gone(trunk: Trunk) -> None:
    await trunk.begin()
    trunk.fill("prfaas-a")
    await until(lambda: trunk.limit("prfaas-a") > 0.8 * BUDGET)
    assert trunk.giving is not None
    trunk.giving.cancel()

    await until(lambda: trunk.limit("prfaas-a") == equal_share(BUDGET, 3))
    await until(
        lambda: (
            trunk.senders["prfaas-a"].node.links["pd-pool"].telemetry.budget_bits_per_s
            == equal_share(BUDGET, 3)
        )
    )
    rates = await trunk.count()

    assert rates["prfaas-a"] <= SLACK * equal_share(BUDGET, 3)
