"""Nothing moves without a ticket: what each end refuses, and that it keeps no promise too long."""

import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.receiver import EARLY_NS
from prfaas.core.transfer.tickets import CLOCK_SKEW_NS, LIFETIME_MAX_NS
from prfaas.wire.fragments import ReceivedBlock, block_digest
from prfaas.wire.identity import make_authority, make_identity
from prfaas.wire.messages.engine import Push
from prfaas.wire.messages.gateway import TransferEnded
from prfaas.wire.messages.link import Abort, Accepted, Commit, Committed, Offer, Refused

from .conftest import World
from .sites import (
    LAYOUT,
    MEMORY,
    NAMED,
    PROMPT,
    Peer,
    Site,
    content,
    dial,
    offer,
    seal,
    source,
    subscribe,
    until,
)

SENT, RECEIVED = {"direction": "sent"}, {"direction": "received"}
PROMPT_BYTES = sum(len(content(key)) for key in PROMPT)
LATE_NS = -CLOCK_SKEW_NS - 10**9

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ended": ({"expires_at_ns": time.time_ns() + LATE_NS}, "expired"),
    "valid for years": ({"expires_at_ns": time.time_ns() + 2 * LIFETIME_MAX_NS}, "too_long"),
    "for another source": ({"source": "other-pool"}, "foreign"),
    "for another destination": ({"destination": "other-pool"}, "foreign"),
    "the other way": ({"source": "pd-pool", "destination": "prfaas-pool"}, "foreign"),
    "for another transfer": ({"transfer_id": b"x" * 16}, "foreign"),
    "for another layout": ({"layout_id": b"M" * 32}, "layout"),
    "for other blocks": ({"blocks": b"d" * 32}, "other_blocks"),
    "signed by a pool": ({"signer": "prfaas-pool"}, "unknown_signer"),
}


def bad_tickets(world: World, transfer: bytes, tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    make_authority(tmp_path)
    make_identity(tmp_path, "gateway")
    good = seal(world.identities, transfer)
    tickets = {
        name: (seal(world.identities, **({"transfer": transfer} | changed(changes))), reason)
        for name, (changes, reason) in BAD.items()
    }
    return tickets | {
        "none": (b"", "missing"),
        "noise": (b"\x91" * 100, "malformed"),
        "cut short": (good[:-1], "malformed"),
        "of another deployment": (seal(tmp_path, transfer), "unknown_signer"),
    }


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    return {"transfer" if name == "transfer_id" else name: v for name, v in changes.items()}


KINDS = [*BAD, "none", "noise", "cut short", "of another deployment"]


# --- the source, asked by an engine ---


@pytest.mark.parametrize("kind", KINDS)
async def test_a_source_serves_nothing_for_a_bad_ticket(
    world: World, kind: str, tmp_path: Path
) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    gateway = await subscribe(prfaas, world.identities)
    transfer = secrets.token_bytes(16)
    sealed, reason = bad_tickets(world, transfer, tmp_path)[kind]
    assert prefill.send(Push(transfer_id=transfer, peer="pd-pool", ticket=sealed, blocks=NAMED))
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: bool(gateway.of(TransferEnded)))
    [ended] = gateway.of(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert (ended.transfer_id, ended.state, ended.reason) == (transfer, "refused", reason)
    assert prfaas.metric("tickets_refused_total", end="source", reason=reason) == 1
    assert prfaas.held() == set(PROMPT)
    again = prefill.push()
    prefill.push_done(again)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    assert pd.held() == set()
    gateway.channel.close("done")


async def test_a_source_uses_a_ticket_once(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = secrets.token_bytes(16)
    sealed = seal(world.identities, transfer)
    push = Push(transfer_id=transfer, peer="pd-pool", ticket=sealed, blocks=NAMED)
    assert prefill.send(push)
    assert prefill.send(push)
    assert await prefill.store(PROMPT[:2], transfer)
    prefill.push_done(transfer)
    await until(lambda: prfaas.metric("transfers_total", **SENT, state="committed") == 1)
    assert prfaas.metric("transfers_total", **SENT, state="refused") == 0
    assert prefill.send(push)
    assert await prefill.store(PROMPT[2:], transfer)
    prefill.push_done(transfer)
    await until(lambda: prfaas.metric("transfers_total", **SENT, state="refused") == 1)
    assert prfaas.metric("tickets_refused_total", end="source", reason="replayed") == 1
    assert pd.held() == set(PROMPT[:2])


async def test_a_source_sends_no_more_than_the_ticket_allows(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push(bytes_max=PROMPT_BYTES - 1)
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: prfaas.metric("transfers_total", **SENT, state="refused") == 1)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="refused") == 1)
    assert prfaas.metric("tickets_refused_total", end="source", reason="oversized") == 1


async def test_a_ticket_for_exactly_these_bytes_is_enough(world: World) -> None:
    _, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push(bytes_max=PROMPT_BYTES)
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    assert pd.held() == set(PROMPT)


async def test_a_transfer_ends_with_its_ticket(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    expires = time.time_ns() - CLOCK_SKEW_NS + 2 * 10**9
    transfer = prefill.push(expires_at_ns=expires)
    assert await prefill.store(PROMPT[:1], transfer)
    await until(lambda: prfaas.metric("transfers_total", **SENT, state="expired") == 1)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="expired") == 1)
    assert time.time_ns() > expires + CLOCK_SKEW_NS


# --- the destination, offered blocks by a source that has the right certificate ---


def a_block(transfer: bytes, key: BlockKey, layout_id: bytes = LAYOUT.layout_id) -> ReceivedBlock:
    data = bytearray(content(key))
    return ReceivedBlock(transfer, layout_id, key, block_digest(layout_id, key, data), data)


async def bring(pd: Site, world: World, peer: Peer) -> None:
    """An honest transfer over the same connection."""
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(world.identities, transfer))
    peer.bring(a_block(transfer, PROMPT[7]))
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=1))
    await until(lambda: any(m.transfer_id == transfer for m in committed(peer)))
    assert PROMPT[7] in pd.held()
    peer.channel.close("done")


def committed(peer: Peer) -> list[Committed]:
    return [m for m in peer.messages if isinstance(m, Committed)]


def refusals(peer: Peer) -> list[str]:
    return [m.reason for m in peer.messages if isinstance(m, Refused)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_destination_takes_nothing_for_a_bad_ticket(
    world: World, kind: str, tmp_path: Path
) -> None:
    pd = await world.start_pd()
    await world.engine("pd-pool")
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    sealed, reason = bad_tickets(world, transfer, tmp_path)[kind]
    peer.channel.send(Offer(transfer_id=transfer, ticket=sealed, blocks=NAMED))
    peer.bring(a_block(transfer, PROMPT[0]))
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=1))
    await until(lambda: bool(peer.of(Abort)))
    assert refusals(peer) == [reason]
    assert pd.metric("tickets_refused_total", end="destination", reason=reason) == 1
    assert pd.held() == set()
    await bring(pd, world, peer)


async def test_an_offer_made_twice_is_one_transfer(world: World) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    twice = offer(world.identities, transfer)
    peer.channel.send(twice)
    peer.channel.send(twice)
    await until(lambda: len(peer.of(Accepted)) == 2)
    assert pd.node.inbound.known.num_open == 1
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=0))
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=5))
    peer.channel.send(Abort(transfer_id=transfer, reason="too late"))
    await bring(pd, world, peer)
    assert pd.metric("transfers_total", **RECEIVED, state="committed") == 2
    assert pd.metric("transfers_total", **RECEIVED, state="aborted") == 0


async def test_a_replayed_ticket_is_refused(world: World) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    again = offer(world.identities, transfer)
    peer.channel.send(again)
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=0))
    await until(lambda: bool(peer.of(Committed)))
    peer.channel.send(again)
    peer.bring(a_block(transfer, PROMPT[0]))
    await until(lambda: bool(peer.of(Abort)))
    assert refusals(peer) == ["replayed"]
    assert pd.held() == set()
    await bring(pd, world, peer)


async def test_more_bytes_than_the_ticket_allows_end_the_transfer(world: World) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    allowed = 2 * len(content(PROMPT[0]))
    peer.channel.send(offer(world.identities, transfer, bytes_max=allowed))
    for key in PROMPT[:4]:
        peer.bring(a_block(transfer, key))
    await until(lambda: bool(peer.of(Abort)))
    assert pd.held() == set(PROMPT[:2])
    assert pd.metric("tickets_refused_total", end="destination", reason="oversized") == 1
    assert pd.metric("transfers_total", **RECEIVED, state="refused") == 1
    await bring(pd, world, peer)


async def test_a_block_of_another_layout_ends_the_transfer(world: World) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(world.identities, transfer))
    peer.bring(a_block(transfer, PROMPT[0], b"M" * 32))
    await until(lambda: bool(peer.of(Abort)))
    assert pd.held() == set()
    assert pd.metric("tickets_refused_total", end="destination", reason="layout") == 1
    await bring(pd, world, peer)


async def test_no_more_is_promised_than_there_is_room_for(world: World) -> None:
    """And whatever ends a transfer gives back what it was promised."""
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    gateway = await dial(pd, world.identities, "gateway")
    ends = ["commit", "abort", "gateway", "over"]
    for end in ends:
        num_refused, num_accepted = len(refusals(peer)), len(peer.of(Accepted))
        first, second = secrets.token_bytes(16), secrets.token_bytes(16)
        large = MEMORY - 100 if end != "over" else 100
        peer.channel.send(offer(world.identities, first, bytes_max=large))
        await until(lambda: len(peer.of(Accepted)) > num_accepted)  # noqa: B023
        assert pd.node.inbound.known.promised_bytes == large
        peer.channel.send(offer(world.identities, second, bytes_max=MEMORY - large + 1))
        await until(lambda: len(refusals(peer)) > num_refused)  # noqa: B023
        assert refusals(peer)[-1] == "no_room"
        if end == "commit":
            peer.channel.send(Commit(transfer_id=first, num_blocks=0))
        elif end == "over":
            peer.bring(a_block(first, PROMPT[0]))
        else:
            teller = gateway if end == "gateway" else peer
            teller.channel.send(Abort(transfer_id=first, reason="enough"))
        await until(lambda: pd.node.inbound.known.promised_bytes == 0)
    gateway.channel.close("done")
    await bring(pd, world, peer)


async def test_what_the_gateway_gave_up_before_the_offer_is_not_taken(world: World) -> None:
    pd = await world.start_pd()
    gateway = await dial(pd, world.identities, "gateway")
    transfer = secrets.token_bytes(16)
    gateway.channel.send(Abort(transfer_id=transfer, reason="client left"))
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="aborted") == 1)
    peer = await source(pd, world.identities)
    peer.channel.send(offer(world.identities, transfer))
    await until(lambda: bool(peer.of(Abort)))
    [answer] = peer.of(Abort)
    assert answer == Abort(transfer_id=transfer, reason="client left")
    gateway.channel.close("done")
    await bring(pd, world, peer)


# --- blocks that overtake their offer on another connection ---


async def test_a_block_that_overtook_its_offer_waits_for_it(world: World) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    await until(lambda: pd.node.inbound.channels.is_connected("prfaas-pool"))
    transfer, done = secrets.token_bytes(16), []
    for key in PROMPT[:2]:
        pd.node.inbound.block("prfaas-pool", a_block(transfer, key), lambda: done.append(True))
    assert (pd.held(), done) == (set(), [])
    peer.channel.send(offer(world.identities, transfer))
    await until(lambda: len(done) == 2)
    assert pd.held() == set(PROMPT[:2])
    peer.channel.send(Commit(transfer_id=transfer, num_blocks=2))
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    await bring(pd, world, peer)


@pytest.mark.parametrize("end", ["refused", "no offer", "link lost"])
async def test_a_block_that_overtook_nothing_is_dropped(world: World, end: str) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    inbound = pd.node.inbound
    await until(lambda: inbound.channels.is_connected("prfaas-pool"))
    transfer, done = secrets.token_bytes(16), []
    inbound.block("prfaas-pool", a_block(transfer, PROMPT[0]), lambda: done.append(True))
    if end == "refused":
        peer.channel.send(Offer(transfer_id=transfer))
    elif end == "no offer":
        inbound._clock_ns = lambda: time.monotonic_ns() + EARLY_NS + 1
        inbound.expire()
        await until(lambda: bool(peer.of(Abort)))
    else:
        peer.channel.close("lost")
    await until(lambda: done == [True])
    assert pd.held() == set()
    assert pd.node.inbound.known.num_open == 0
    await bring(pd, world, await source(pd, world.identities))
    peer.channel.close("done")


# --- the blocks that a ticket names ---

OTHERS = BlockKey(0, b"another tenant's block, its name")


async def test_a_destination_takes_no_block_that_the_ticket_does_not_name(world: World) -> None:
    site = await world.start_pd()
    peer = await source(site, world.identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(world.identities, transfer))
    for key in (PROMPT[0], OTHERS):
        peer.bring(a_block(transfer, key))
    await until(lambda: site.metric("transfers_total", **RECEIVED, state="refused") == 1)
    assert site.metric("tickets_refused_total", end="destination", reason="unnamed") == 1
    assert site.held() == {PROMPT[0]}
    peer.channel.close("done")


async def test_a_source_sends_no_block_that_the_ticket_does_not_name(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    assert await prefill.store([PROMPT[0], OTHERS], transfer)
    prefill.push_done(transfer)
    await until(lambda: prfaas.metric("transfers_total", **SENT, state="refused") == 1)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="refused") == 1)
    assert prfaas.metric("tickets_refused_total", end="source", reason="unnamed") == 1
    assert OTHERS not in pd.held()


async def test_a_list_of_blocks_that_was_not_signed_starts_nothing(world: World) -> None:
    site = await world.start_pd()
    peer = await source(site, world.identities)
    transfer = secrets.token_bytes(16)
    longer = NAMED | {0: NAMED[0] + OTHERS.block_hash}
    sealed = seal(world.identities, transfer)
    peer.channel.send(Offer(transfer_id=transfer, ticket=sealed, blocks=longer))
    await until(lambda: refusals(peer) == ["other_blocks"])
    assert site.metric("tickets_refused_total", end="destination", reason="other_blocks") == 1
    peer.channel.close("done")
