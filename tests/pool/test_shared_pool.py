"""A pool node that two sites share: nothing of one is for the other, whatever a gateway sends."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from prfaas.audit.settings import AuditSettings
from prfaas.billing.report import Period, logs_in_folders, make_bill
from prfaas.core.billing.usage import UsagePhase
from prfaas.core.cache.keep_rules import ORDERS_MAX, Effect
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.pool.sites.sites import Sites
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.base import Goodbye, Ping, Pong
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.engine import MISS, Lookup
from prfaas.wire.messages.fields import keys_of, wire_keys
from prfaas.wire.messages.gateway import (
    OrderDone,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TransferEnded,
)
from prfaas.wire.messages.link import Abort, Join, PoolHello, Resumed
from tests.orders import purge

from .shared_pool import TAGS, Shared, forge, shared
from .sites import LOOPBACK, Peer, dial, until


def blocks(first: int, count: int = 4) -> list[BlockKey]:
    return [BlockKey(0, n.to_bytes(32, "big")) for n in range(first, first + count)]


A, B = blocks(1000), blocks(2000)


def seen(peer: Peer) -> set[BlockKey]:
    """Names that a gateway was told of."""
    found = set[BlockKey]()
    for message in peer.messages:
        if isinstance(message, Snapshot | Stored):
            found |= set(keys_of(message.keys))
    return found


def has_seen(peer: Peer, keys: list[BlockKey]) -> bool:
    return seen(peer) == set(keys)


async def both_stored(world: Shared) -> None:
    assert await world.prefill("a", A)
    assert await world.prefill("b", B)
    await until(lambda: world.pds["a"].held() == set(A) and world.pds["b"].held() == set(B))


async def test_gateways_learn_of_their_own_site_alone(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        early = {site: await world.gateway(site) for site in "ab"}
        await both_stored(world)
        late = {site: await world.gateway(site) for site in "ab"}
        for gateways in (early, late):
            for site, keys in (("a", A), ("b", B)):
                peer = gateways[site]
                await until(partial(has_seen, peer, keys))
        for site, peer in early.items():
            await until(partial(peer.of, TransferEnded))
            states = [each for each in peer.messages if isinstance(each, PoolState)]
            assert {name for state in states for name in state.links} == {f"pd-{site}-pool"}
            assert {n for state in states for n in state.telemetry} == {f"pd-{site}-pool"}
            assert all(not state.tenants and not state.num_leased for state in states)
            held = world.node.node.store.room.held_bytes[site]
            assert {state.tiers["host"].used_bytes for state in states} <= {0, held}
            ended = [each for each in peer.messages if isinstance(each, TransferEnded)]
            assert [each.peer for each in ended] == [f"pd-{site}-pool"]
            # A gap in the numbers would tell how much the other does.
            events = [e.seq for e in peer.messages if isinstance(e, Stored | TransferEnded)]
            assert max(events) < len(peer.messages)


@pytest.mark.parametrize(
    "ticket",
    [
        {"signer": "gateway-b"},
        {"signer": "gateway-b", "tenant": TAGS["b"]},
    ],
    ids=["of b for a", "of b for its own tag"],
)
async def test_a_ticket_for_another_site_is_refused(
    tmp_path: Path, ticket: dict[str, object]
) -> None:
    async with shared(tmp_path) as world:
        world.push("a", A, **ticket)
        await until(lambda: world.refusals("site") == 1)
        assert world.node.node.links["pd-a-pool"].num_open == 0


async def test_a_site_cannot_use_the_tag_or_the_blocks_of_another(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        await both_stored(world)
        world.push("b", B, tenant=TAGS["a"])
        await until(lambda: world.refusals("site") == 1)
        world.push("b", [*B, A[0]])
        await until(lambda: world.refusals("site") == 2)
        assert world.pds["b"].held() == set(B)


async def test_blocks_of_a_prompt_under_another_tag_are_not_kept(tmp_path: Path) -> None:
    """A gateway signs for its own tenant, and sends the prompt with another salt."""
    async with shared(tmp_path) as world:
        transfer = world.push("b", B)
        assert not await world.engine.store(B, transfer, TAGS["a"])
        assert not await world.engine.store(B, transfer)
        assert not await world.engine.store(B)
        assert world.node.held() == set()
        assert await world.engine.store(B, transfer, TAGS["b"])


async def test_an_authority_cannot_sign_names_of_another_site(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        (tmp_path / "b" / "ca.pem").write_bytes((tmp_path / "b" / "own.pem").read_bytes())
        make_identity(tmp_path / "b", "gateway-a")
        trusted = (tmp_path / "prfaas" / "ca.pem").read_text()
        with (tmp_path / "b" / "ca.pem").open("a") as file:
            file.write(trusted)
        forger = await dial(world.node, tmp_path / "b", "gateway-a")
        world.peers.append(forger)
        forger.channel.send(Subscribe(gateway="gateway-a"))
        await until(lambda: forger.closed or forger.of(Goodbye))
        assert not forger.of(SnapshotEnd)
        honest = await world.gateway("a")
        await until(lambda: honest.of(SnapshotEnd))


async def test_a_gateway_purges_its_own_tenants_alone(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        await both_stored(world)
        b = await world.gateway("b")
        b.channel.send(purge(job=0, tenant=TAGS["a"]))
        b.channel.send(purge(job=1, source="prfaas-pool"))
        b.channel.send(purge(job=2, source="other-pool", tenant=TAGS["b"]))
        await until(lambda: len(b.of(OrderDone)) == 3)
        answers = [each.problem for each in b.messages if isinstance(each, OrderDone)]
        assert all("its own tenants" in problem for problem in answers)
        assert world.node.held() == {*A, *B}
        b.channel.send(purge(job=9, tenant=TAGS["b"]))
        await until(lambda: len(b.of(OrderDone)) == 4)
        assert world.node.held() == set(A)


async def test_purges_of_a_gateway_end_no_other_purge(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        a, b = await world.gateway("a"), await world.gateway("b")
        a.channel.send(purge(job=0, tenant=TAGS["a"]))
        await until(partial(a.of, OrderDone))
        for job in range(ORDERS_MAX[Effect.PURGE] + 1):
            b.channel.send(purge(job=job, tenant=tenant_tag(f"salt {job}")))
        await until(lambda: len(b.of(OrderDone)) == ORDERS_MAX[Effect.PURGE] + 1)
        problems = [each.problem for each in b.messages if isinstance(each, OrderDone)]
        assert sum(bool(problem) for problem in problems) == 1
        assert len(world.node.node.store.rules.orders) == ORDERS_MAX[Effect.PURGE] + 1


async def test_a_gateway_cannot_end_transfers_of_another_site(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        transfer = world.push("a", A)
        link = world.node.node.links["pd-a-pool"]
        await until(lambda: link.has(transfer))
        b, a = await world.gateway("b"), await world.gateway("a")
        b.channel.send(Abort(transfer_id=transfer, reason="why not"))
        b.channel.send(purge(job=1, source="x"))
        await until(lambda: b.of(OrderDone))
        assert link.has(transfer)
        a.channel.send(Abort(transfer_id=transfer, reason="mine"))
        await until(lambda: not link.has(transfer))


async def test_a_revoked_site_ends_and_the_other_goes_on(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        await both_stored(world)
        a, b = await world.gateway("a"), await world.gateway("b")
        open_transfer = world.push("a", blocks(3000))
        await until(lambda: world.node.node.links["pd-a-pool"].has(open_transfer))
        world.contracts("b")
        await until(lambda: a.closed and "pd-a-pool" not in world.node.node.links)
        again = await dial(world.node, tmp_path / "a", "gateway-a")
        world.peers.append(again)
        await until(lambda: again.closed)
        world.push("a", blocks(4000))
        await until(lambda: world.node.metric("pool_blocks_dropped_total", reason="unknown_peer"))
        assert await world.prefill("b", blocks(5000))
        await until(lambda: set(blocks(5000)) <= world.pds["b"].held())
        assert not b.closed
        # A file that is wrong changes nothing.
        (tmp_path / "contracts.toml").write_text("[contracts.b]\nshare = -1\n")
        assert await world.prefill("b", blocks(6000))
        world.contracts("a", "b")
        await until(lambda: "pd-a-pool" in world.node.node.links)
        await until(lambda: world.node.node.links["pd-a-pool"].is_up)
        assert await world.prefill("a", blocks(7000))


@pytest.mark.parametrize("reserve", [0.3, 0.0])
async def test_a_flood_of_a_site_takes_no_block_of_the_reserve_of_another(
    tmp_path: Path, reserve: float
) -> None:
    async with shared(tmp_path, 1 << 16, cache_reserve=reserve) as world:
        assert await world.prefill("a", A)
        for first in range(10_000, 11_600, 16):
            await world.prefill("b", blocks(first, 16))
        kept = set(A) & world.node.held()
        assert kept == (set(A) if reserve else set())


async def test_the_bill_of_transfers_and_storage_is_by_site(tmp_path: Path) -> None:
    settings = AuditSettings(tmp_path / "audit", tmp_path / "audit")
    async with shared(tmp_path, audit=settings) as world:
        await both_stored(world)
        await until(lambda: not any(link.num_open for link in world.node.node.links.values()))
        stored = world.node.process.storage._sums
        await until(lambda: {("host", "a"), ("host", "b")} <= stored.keys())
        sent = {
            site: world.node.metric("link_bytes_total", peer=f"pd-{site}-pool", direction="sent")
            for site in "ab"
        }
    bill = make_bill(logs_in_folders([tmp_path / "audit"]), Period())
    rows = {(key.tenant, key.phase): row.amounts for key, row in bill.rows.items()}
    assert {site: rows[site, UsagePhase.TRANSFER].sent_bytes for site in "ab"} == sent
    assert all(sent.values())
    assert all(rows[site, UsagePhase.STORAGE].byte_ns for site in "ab")


async def test_an_authority_cannot_sign_a_pool_of_the_prfaas_site(tmp_path: Path) -> None:
    node = {"sources": frozenset({"other-pool"})}
    async with shared(tmp_path, node=node) as world:
        forge(tmp_path, "b", "other-pool")
        forger = await dial(world.node, tmp_path / "b", "other-pool")
        world.peers.append(forger)
        forger.channel.send(PoolHello(pool="other-pool", epoch="e", link="1" * 32))
        await until(lambda: forger.closed or forger.of(Resumed))
        assert not forger.of(Resumed)
        assert not world.node.node.inbound.channels.is_connected("other-pool")
        own = await dial(world.node, tmp_path / "prfaas", "other-pool")
        world.peers.append(own)
        own.channel.send(PoolHello(pool="other-pool", epoch="e", link="2" * 32))
        await until(lambda: own.of(Resumed))
        # A data connection of the forger ends, and the link stands.
        refused = world.node.metric("connections_refused_total", port="link")
        tls = identity_in(tmp_path / "b", "other-pool").dialling().data
        _, writer = await asyncio.open_connection(LOOPBACK, world.node.port, ssl=tls)
        writer.write(encode(Join(pool="other-pool", link="2" * 32, number=1)))
        await until(lambda: world.node.metric("connections_refused_total", port="link") > refused)
        writer.transport.abort()
        assert own.channel.is_open


async def test_a_forged_name_is_answered_like_an_unknown_one(tmp_path: Path) -> None:
    """Or names of gateways, and their sites, could be tried."""
    async with shared(tmp_path) as world:
        answers = set[str]()
        for name in ("gateway-a", "gateway-q"):
            forge(tmp_path, "b", name)
            forger = await dial(world.node, tmp_path / "b", name)
            world.peers.append(forger)
            await until(lambda peer=forger: peer.closed)  # type: ignore[misc]
            answers |= {e.reason for e in forger.messages if isinstance(e, Goodbye)}
        assert len(answers) == 1
        assert not any("gateway-" in answer for answer in answers)


async def test_gateways_do_not_learn_how_busy_the_node_is(tmp_path: Path) -> None:
    node = {"gateways": frozenset({"gateway-prfaas"})}
    async with shared(tmp_path, node=node) as world:
        world.node.node.link_port._busy.share = lambda: 0.5  # type: ignore[method-assign]
        own = await dial(world.node, tmp_path / "prfaas", "gateway-prfaas")
        b = await world.gateway("b")
        world.peers.append(own)
        for peer in (own, b):
            peer.channel.send(Ping(at_ns=1))
            await until(partial(peer.of, Pong))
            assert [e.busy for e in peer.messages if isinstance(e, Pong)] == [0.0]


async def test_a_source_of_the_own_site_learns_how_busy_the_node_is(tmp_path: Path) -> None:
    """It turns coding off where the receiver has no time to decode."""
    async with shared(tmp_path, node={"sources": frozenset({"other-pool"})}) as world:
        world.node.node.link_port._busy.share = lambda: 0.5  # type: ignore[method-assign]
        own = await dial(world.node, tmp_path / "prfaas", "other-pool")
        world.peers.append(own)
        own.channel.send(PoolHello(pool="other-pool", epoch="e", link="3" * 32))
        own.channel.send(Ping(at_ns=1))
        await until(lambda: own.of(Pong))
        assert [e.busy for e in own.messages if isinstance(e, Pong)] == [0.5]


async def test_a_gateway_is_no_source_to_wait_for(tmp_path: Path) -> None:
    async with shared(tmp_path) as world:
        await world.gateway("b")
        await until(lambda: world.node.node.feed.num_subscribers)
        lookup = Lookup(job=900, keys=wire_keys(A), transfer_id=b"t" * 16, source="gateway-b")
        world.engine.send(lookup)
        await until(lambda: 900 in world.engine.found)
        assert list(world.engine.found[900]) == [MISS] * len(A)


async def test_a_gateway_of_the_prfaas_site_reads_all_events(tmp_path: Path) -> None:
    node = {"gateways": frozenset({"gateway-prfaas"})}
    async with shared(tmp_path, node=node) as world:
        early = await dial(world.node, tmp_path / "prfaas", "gateway-prfaas")
        world.peers.append(early)
        early.channel.send(Subscribe(gateway="gateway-prfaas"))
        await both_stored(world)
        late = await dial(world.node, tmp_path / "prfaas", "gateway-prfaas")
        world.peers.append(late)
        late.channel.send(Subscribe(gateway="gateway-prfaas"))
        for peer in (early, late):
            await until(partial(has_seen, peer, [*A, *B]))
            await until(partial(peer.of, PoolState))
            assert peer.channel.is_open


async def test_an_authority_file_that_is_away_ends_neither_the_node_nor_a_revocation(
    tmp_path: Path,
) -> None:
    async with shared(tmp_path) as world:
        a, b = await world.gateway("a"), await world.gateway("b")
        own = tmp_path / "prfaas" / "ca.pem"
        own.rename(tmp_path / "prfaas" / "away")
        world.contracts("b")
        await until(lambda: a.closed and "pd-a-pool" not in world.node.node.links)
        assert await world.prefill("b", B)
        await until(lambda: world.pds["b"].held() == set(B))
        assert not b.closed
        world.contracts("a", "b")
        await until(lambda: "pd-a-pool" in world.node.node.links)
        (tmp_path / "prfaas" / "away").rename(own)
        await until(lambda: not world.node.node.link_room._is_opener_due)
        await until(lambda: world.node.node.links["pd-a-pool"].is_up)
        assert await world.prefill("a", A)


async def test_a_later_contract_cannot_name_a_part_of_the_prfaas_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with shared(tmp_path, node={"gateways": frozenset({"gateway-prfaas"})}) as world:
        file = tmp_path / "contracts.toml"
        (tmp_path / "new").write_text(file.read_text().replace("gateway-b", "gateway-prfaas"))
        (tmp_path / "new").rename(file)
        await until(lambda: "contracts_kept" in caplog.text or "contracts_changed" in caplog.text)
        assert "is a part of this site" in caplog.text
        assert world.node.node.sites.site_of("gateway-b") == "b"


@pytest.mark.parametrize("rate", ['"50Mbps"', '"4Gbps"', None])
async def test_a_changed_rate_applies_to_a_transfer_that_runs(
    tmp_path: Path, rate: str | None
) -> None:
    async with shared(tmp_path, link_rate='"200Mbps"') as world:
        link, more = world.node.node.links["pd-a-pool"], {"link_rate": rate} if rate else {}
        a = await world.gateway("a")
        transfer = world.push("a", A)
        await until(lambda: link.has(transfer))
        world.contracts("a", "b", **more)
        budget = {None: 0, '"50Mbps"': 50_000_000, '"4Gbps"': 4_000_000_000}[rate]
        await until(lambda: link.control._pacer.bits_per_s == budget)
        assert link is world.node.node.links["pd-a-pool"]
        assert link.has(transfer)
        assert link.is_up
        assert not a.closed
        assert await world.engine.store(A, transfer, TAGS["a"])
        world.engine.push_done(transfer)
        await until(lambda: world.pds["a"].held() == set(A))


async def test_a_further_authority_ends_nothing_and_a_removed_one_does(tmp_path: Path) -> None:
    """As in the rotation of a site's authority."""
    async with shared(tmp_path) as world:
        a, b = await world.gateway("a"), await world.gateway("b")
        own, old = tmp_path / "a" / "own.pem", (tmp_path / "a" / "own.pem").read_text()
        make_authority(tmp_path / "next")
        (tmp_path / "both").write_text(old + (tmp_path / "next" / "ca.pem").read_text())
        (tmp_path / "both").rename(own)
        assert isinstance(world.node.node.sites, Sites)
        authorities = world.node.node.sites._agreements.authorities
        await until(lambda: len(authorities.keys_of("a")) == 2)
        await until(lambda: not world.node.node.link_room._is_opener_due)
        assert not a.closed
        assert world.node.node.links["pd-a-pool"].is_up
        (tmp_path / "new").write_bytes((tmp_path / "next" / "ca.pem").read_bytes())
        (tmp_path / "new").rename(own)
        await until(lambda: a.closed)
        assert not b.closed
