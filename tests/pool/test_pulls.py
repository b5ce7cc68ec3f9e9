"""Pulls between two real pool nodes: blocks come by name, and what does not come is told."""

import asyncio
import secrets
from typing import Any

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.transfer_state import TransferEnd
from prfaas.wire.fragments import ReceivedBlock, block_digest
from prfaas.wire.messages.base import Message
from prfaas.wire.messages.engine import HIT, MISS, ON_ITS_WAY
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import TransferEnded
from prfaas.wire.messages.link import Abort, Commit, Missing, Pull, Refused
from tests.pool.asked_pulls import a_pull

from .conftest import World
from .sites import (
    LAYOUT,
    PROMPT,
    Engine,
    Peer,
    Site,
    content,
    dial,
    offer,
    source,
    subscribe,
    until,
)

UNKNOWN = [BlockKey(0, bytes([200 + n]) * 32) for n in range(3)]
ENDED = {"direction": "received"}


async def filled(world: World) -> tuple[Site, Site, Engine, Engine, Peer]:
    """Two sites, the source of which holds a prompt, and a gateway at the destination."""
    prfaas, pd, prefill, decode = await world.two_sites()
    assert await prefill.store(PROMPT)
    return prfaas, pd, prefill, decode, await subscribe(pd, world.identities)


async def ended(gateway: Peer, pull: Message) -> TransferEnded:
    assert isinstance(pull, Pull)

    def events() -> list[TransferEnded]:
        found = [m for m in gateway.messages if isinstance(m, TransferEnded)]
        return [event for event in found if event.transfer_id == pull.transfer_id]

    await until(events)
    [event] = events()
    return event


async def test_named_blocks_are_fetched_and_nothing_else(world: World) -> None:
    prfaas, pd, _, decode, gateway = await filled(world)
    pull = a_pull(world, PROMPT[2:6])
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.num_blocks, event.num_missing) == ("committed", 4, 0)
    assert event.peer == "prfaas-pool"
    assert pd.held() == set(PROMPT[2:6])
    assert await decode.load(PROMPT[2:6]) == [True] * 4
    for row, key in enumerate(PROMPT[2:6]):
        assert decode.row(row, key.group) == content(key)
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="committed") == 1)
    gateway.channel.close("done")


async def test_what_the_source_lacks_is_told_and_the_rest_comes(world: World) -> None:
    _, pd, _, decode, gateway = await filled(world)
    pull = a_pull(world, [UNKNOWN[0], PROMPT[0], UNKNOWN[1]])
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.num_blocks, event.num_missing) == ("committed", 1, 2)
    [told] = gateway.of(Missing)
    assert told == Missing(transfer_id=pull.transfer_id, keys=wire_keys(UNKNOWN[:2]))
    assert pd.held() == {PROMPT[0]}
    assert await decode.look_up([PROMPT[0], UNKNOWN[0]], pull.transfer_id) == [HIT, MISS]
    gateway.channel.close("done")


async def test_a_pull_of_nothing_that_is_there_ends_at_once(world: World) -> None:
    _, pd, _, _, gateway = await filled(world)
    pull = a_pull(world, UNKNOWN)
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.num_blocks, event.num_missing) == ("committed", 0, 3)
    assert pd.held() == set()
    gateway.channel.close("done")


async def test_what_is_here_already_is_not_fetched_again(world: World) -> None:
    _, pd, _, decode, gateway = await filled(world)
    assert await decode.store(PROMPT[:3])
    some, none = a_pull(world, PROMPT[:5]), a_pull(world, PROMPT[:3])
    gateway.channel.send(some)
    gateway.channel.send(none)
    assert (await ended(gateway, some)).num_blocks == 2
    assert (await ended(gateway, none)).num_blocks == 0
    assert pd.held() == set(PROMPT[:5])
    gateway.channel.close("done")


async def test_an_engine_pulls_too(world: World) -> None:
    _, pd, _, decode, gateway = await filled(world)
    pull = a_pull(world, [*PROMPT, UNKNOWN[0]])
    assert decode.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.num_blocks, event.num_missing) == ("committed", len(PROMPT), 1)
    assert pd.held() == set(PROMPT)
    gateway.channel.close("done")


async def test_a_pull_said_twice_is_one_and_a_used_ticket_pulls_nothing(world: World) -> None:
    _, pd, _, _, gateway = await filled(world)
    pull = a_pull(world, PROMPT[:2])
    gateway.channel.send(pull)
    gateway.channel.send(pull)
    await ended(gateway, pull)
    assert gateway.of(Refused) == []
    gateway.channel.send(pull)
    await until(lambda: bool(gateway.of(Refused)))
    assert gateway.of(Refused) == [Refused(transfer_id=pull.transfer_id, reason="replayed")]
    assert pd.metric("transfers_total", **ENDED, state="committed") == 1
    gateway.channel.close("done")


@pytest.mark.parametrize(
    ("ticket", "reason"),
    [
        ({"source": "other-pool"}, "foreign"),
        ({"signer": "pd-pool"}, "unknown_signer"),
        ({"expires_at_ns": 1}, "expired"),
        ({"layout_id": b"M" * 32}, "layout"),
        ({"bytes_max": 1 << 40}, "no_room"),
    ],
)
async def test_a_bad_ticket_pulls_nothing(
    world: World, ticket: dict[str, Any], reason: str
) -> None:
    prfaas, pd, _, _, gateway = await filled(world)
    pull = a_pull(world, PROMPT, **ticket)
    gateway.channel.send(pull)
    await until(lambda: bool(gateway.of(Refused)))
    assert gateway.of(Refused) == [Refused(transfer_id=pull.transfer_id, reason=reason)]
    assert pd.metric("tickets_refused_total", end="destination", reason=reason) == 1
    assert (pd.held(), pd.node.inbound.known.num_open) == (set(), 0)
    assert prfaas.metric("transfers_total", direction="sent", state="committed") == 0
    gateway.channel.close("done")


async def test_a_source_that_refuses_ends_the_pull(world: World) -> None:
    """Its clock, or its list of gateways, may differ from the destination's."""
    prfaas, pd, _, _, gateway = await filled(world)
    prfaas.node.link_room.tickets._unix_ns = lambda: 2**62
    pull = a_pull(world, PROMPT)
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.reason) == ("refused", "unknown_signer")
    assert len(gateway.of(Refused)) == 1
    assert prfaas.metric("tickets_refused_total", end="source", reason="unknown_signer") == 1
    assert pd.held() == set()
    gateway.channel.close("done")


async def test_a_pull_beyond_its_budget_is_ended(world: World) -> None:
    prfaas, pd, _, _, gateway = await filled(world)
    pull = a_pull(world, PROMPT, bytes_max=300)
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert event.kind is TransferEnd.REFUSED
    assert event.reason == "oversized"
    assert prfaas.metric("tickets_refused_total", end="source", reason="oversized") == 1
    assert len(pd.held()) <= 2
    gateway.channel.close("done")


async def test_without_a_link_a_pull_ends_at_once(world: World) -> None:
    pd = await world.start_pd()
    gateway = await subscribe(pd, world.identities)
    pull = a_pull(world, PROMPT)
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.reason) == ("aborted", "link_down")
    gateway.channel.close("done")


async def test_a_pull_whose_link_breaks_before_the_offer_ends(world: World) -> None:
    prfaas, pd, _, decode, gateway = await filled(world)
    world.relay.flows.clear()
    pull = a_pull(world, PROMPT)
    gateway.channel.send(pull)
    await until(lambda: pd.node.inbound.known.is_open(pull.transfer_id))
    assert await decode.look_up(PROMPT[:1], pull.transfer_id) == [ON_ITS_WAY]
    world.relay.cut()
    world.relay.is_plugged = True
    event = await ended(gateway, pull)
    assert (event.state, event.reason) == ("aborted", "link_lost")
    await world.linked(prfaas, pd)
    again = a_pull(world, PROMPT)
    gateway.channel.send(again)
    assert (await ended(gateway, again)).state == "committed"
    gateway.channel.close("done")


async def test_a_gateway_that_leaves_ends_its_pull_by_an_abort(world: World) -> None:
    prfaas, pd, _, _, gateway = await filled(world)
    world.relay.flows.clear()
    pull = a_pull(world, PROMPT)
    gateway.channel.send(pull)
    await until(lambda: pd.node.inbound.known.is_open(pull.transfer_id))
    gateway.channel.send(Abort(transfer_id=pull.transfer_id, reason="client left"))
    assert (await ended(gateway, pull)).state == "aborted"
    world.relay.flows.set()
    await until(lambda: prfaas.metric("transfers_total", direction="sent", state="aborted") == 1)
    assert pd.held() == set()
    gateway.channel.close("done")


async def test_a_thousand_blocks_come_with_one_pull(world: World) -> None:
    prfaas, pd, _, _, gateway = await filled(world)
    keys = [BlockKey(0, secrets.token_bytes(32)) for _ in range(1000)]
    for key in keys:
        data = bytearray(key.block_hash * 4)
        assert prfaas.node.store.put(
            LAYOUT.layout_id, key, data, block_digest(LAYOUT.layout_id, key, data)
        )
    pull = a_pull(world, keys, bytes_max=128_000)
    gateway.channel.send(pull)
    event = await ended(gateway, pull)
    assert (event.state, event.num_blocks) == ("committed", 1000)
    assert pd.held() == set(keys)
    gateway.channel.close("done")


# --- a source that misbehaves ---


async def asked(world: World) -> tuple[Site, Peer, Peer, Pull]:
    """A destination that waits for a pull from a source of the test's."""
    pd = await world.start_pd()
    peer, gateway = await source(pd, world.identities), await subscribe(pd, world.identities)
    await until(lambda: pd.node.inbound.channels.is_connected("prfaas-pool"))
    pull = a_pull(world, PROMPT[:2])
    gateway.channel.send(pull)
    await until(lambda: bool(peer.of(Pull)))
    assert peer.of(Pull) == [pull]
    return pd, peer, gateway, pull


async def test_what_was_not_asked_for_is_not_taken(world: World) -> None:
    pd, peer, gateway, pull = await asked(world)
    data = bytearray(content(PROMPT[5]))
    digest = block_digest(LAYOUT.layout_id, PROMPT[5], data)
    peer.channel.send(offer(world.identities, pull.transfer_id))
    peer.bring(ReceivedBlock(pull.transfer_id, LAYOUT.layout_id, PROMPT[5], digest, data))
    event = await ended(gateway, pull)
    assert (event.state, event.reason) == ("refused", "unnamed")
    assert pd.held() == set()
    for channel in (peer.channel, gateway.channel):
        channel.close("done")


async def test_a_source_that_says_nothing_is_waited_for_until_its_link_ends(world: World) -> None:
    pd, peer, gateway, pull = await asked(world)
    assert pd.node.inbound.known.is_open(pull.transfer_id)
    peer.channel.close("gone")
    event = await ended(gateway, pull)
    assert (event.state, event.reason) == ("aborted", "link_lost")
    gateway.channel.close("done")


async def test_a_pull_that_was_given_up_before_it_came_is_not_begun(world: World) -> None:
    pd = await world.start_pd()
    peer, gateway = await source(pd, world.identities), await subscribe(pd, world.identities)
    pull = a_pull(world, PROMPT[:2])
    gateway.channel.send(Abort(transfer_id=pull.transfer_id, reason="client left"))
    gateway.channel.send(pull)
    await until(lambda: bool(gateway.of(Refused)))
    [told] = gateway.of(Refused)
    assert isinstance(told, Refused)
    assert told.reason == "client left"
    assert pd.node.inbound.known.num_open == 0
    assert peer.of(Pull) == []
    for channel in (peer.channel, gateway.channel):
        channel.close("done")


async def test_missing_blocks_nobody_asked_for_are_not_counted(world: World) -> None:
    _, peer, gateway, pull = await asked(world)
    peer.channel.send(offer(world.identities, pull.transfer_id))
    missing = wire_keys([*PROMPT[:2], *UNKNOWN])
    peer.channel.send(Commit(transfer_id=pull.transfer_id, num_blocks=0, missing=missing))
    event = await ended(gateway, pull)
    assert (event.state, event.num_missing) == ("committed", 2)
    for channel in (peer.channel, gateway.channel):
        channel.close("done")


async def test_only_gateways_and_engines_ask_for_pulls(world: World) -> None:
    pd = await world.start_pd()
    peer = await source(pd, world.identities)
    peer.channel.send(a_pull(world, PROMPT))
    await until(lambda: bool(peer.closed))
    gateway = await dial(pd, world.identities, "gateway")
    gateway.channel.send(Refused(transfer_id=b"t" * 16, reason="no"))
    async with asyncio.timeout(10):
        await until(lambda: bool(gateway.closed))
    assert pd.metric("connections_refused_total", port="link") == 2
