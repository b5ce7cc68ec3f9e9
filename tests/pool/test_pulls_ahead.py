"""Pulls of blocks that an engine has yet to store: each comes once it is there."""

from __future__ import annotations

import asyncio
from typing import Any

from prfaas.core.kv.blocks import BlockKey
from prfaas.wire.messages.gateway import TransferEnded
from prfaas.wire.messages.link import Abort, Ahead, Missing, Pull, all_computed

from .asked_pulls import a_pull
from .conftest import World
from .sites import PROMPT, Engine, Peer, Site, content, subscribe, until


def ahead(world: World, keys: list[BlockKey]) -> Pull:
    pull = a_pull(world, keys)
    pull.ahead = Ahead.COMPUTING
    return pull


def computed(pull: Pull) -> Pull:
    return all_computed(pull.transfer_id, pull.source)


async def sites(world: World) -> tuple[Site, Site, Engine, Engine, Peer]:
    prfaas, pd, prefill, decode = await world.two_sites()
    return prfaas, pd, prefill, decode, await subscribe(pd, world.identities)


def num_waits(site: Site) -> int:
    return len(site.node.link_room.sending.waits)


async def waits(site: Site) -> None:
    await until(lambda: num_waits(site))


def ends(gateway: Peer) -> list[Any]:
    return gateway.of(TransferEnded)


async def test_blocks_are_sent_once_they_are_stored(world: World) -> None:
    prfaas, pd, prefill, decode, gateway = await sites(world)
    pull = ahead(world, PROMPT)
    gateway.channel.send(pull)
    await waits(prfaas)
    assert await prefill.store(PROMPT[:3])
    await until(lambda: set(PROMPT[:3]) <= pd.held())
    assert ends(gateway) == []
    assert await prefill.store(PROMPT[3:])
    await until(lambda: ends(gateway))
    [event] = ends(gateway)
    assert (event.state, event.num_blocks, event.num_missing) == ("committed", len(PROMPT), 0)
    assert await decode.load(PROMPT[2:6]) == [True] * 4
    for row, key in enumerate(PROMPT[2:6]):
        assert decode.row(row, key.group) == content(key)
    assert num_waits(prfaas) == 0
    gateway.channel.close("done")


async def test_what_is_not_stored_behind_the_answer_is_missing(world: World) -> None:
    prfaas, pd, prefill, _, gateway = await sites(world)
    pull = ahead(world, PROMPT)
    gateway.channel.send(pull)
    await waits(prfaas)
    gateway.channel.send(computed(pull))
    # Behind the answer, as SGLang does: it still comes.
    assert await prefill.store(PROMPT[:2])
    await until(lambda: ends(gateway))
    [event] = ends(gateway)
    num_missing = len(PROMPT) - 2
    assert (event.state, event.num_blocks, event.num_missing) == ("committed", 2, num_missing)
    assert pd.held() == set(PROMPT[:2])
    [told] = gateway.of(Missing)
    assert isinstance(told, Missing)
    assert len(told.keys) == num_missing
    assert num_waits(prfaas) == 0
    gateway.channel.close("done")


async def test_a_pull_that_is_given_up_waits_for_nothing(world: World) -> None:
    prfaas, pd, prefill, _, gateway = await sites(world)
    pull = ahead(world, PROMPT)
    gateway.channel.send(pull)
    await waits(prfaas)
    there = await subscribe(prfaas, world.identities)
    for each in (gateway, there):
        each.channel.send(Abort(transfer_id=pull.transfer_id, reason="nobody waits"))
    await until(lambda: ends(gateway) and not num_waits(prfaas))
    assert await prefill.store(PROMPT)
    gateway.channel.send(computed(pull))  # Late: it is known nowhere any more.
    other = a_pull(world, PROMPT[:1])
    gateway.channel.send(other)
    await until(lambda: len(ends(gateway)) == 2)
    assert pd.held() == {PROMPT[0]}
    gateway.channel.close("done")
    there.channel.close("done")


async def test_a_link_that_is_lost_ends_the_wait(world: World) -> None:
    prfaas, pd, _, _, gateway = await sites(world)
    gateway.channel.send(ahead(world, PROMPT))
    await waits(prfaas)
    gateway.channel.close("done")
    await pd.kill()
    await until(lambda: not num_waits(prfaas))


async def test_an_answer_while_the_link_is_down_reaches_the_source(world: World) -> None:
    grace = {"link_grace_ns": 100 * 10**9}
    pd = await world.start_pd(**grace)
    prfaas = await world.start("prfaas-pool", **grace)
    await world.linked(prfaas, pd)
    prefill = await world.engine("prfaas-pool")
    await world.engine("pd-pool")
    gateway = await subscribe(pd, world.identities)
    pull = ahead(world, PROMPT)
    gateway.channel.send(pull)
    await waits(prfaas)
    assert await prefill.store(PROMPT[:2])
    await until(lambda: set(PROMPT[:2]) <= pd.held())
    world.relay.cut()
    await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
    gateway.channel.send(computed(pull))
    # Its end shows that the message before it was handled.
    gateway.channel.send(a_pull(world, PROMPT[2:3]))
    await until(lambda: ends(gateway))
    world.relay.is_plugged = True
    await world.linked(prfaas, pd)
    await until(lambda: len(ends(gateway)) == 2)
    event = ends(gateway)[1]
    assert (event.transfer_id, event.state, event.num_blocks, event.num_missing) == (
        pull.transfer_id,
        "committed",
        2,
        len(PROMPT) - 2,
    )
    assert pd.node.inbound.known.num_open == 0
    gateway.channel.close("done")


async def test_many_transfers_wait_for_one_block(world: World) -> None:
    prfaas, pd, prefill, _, gateway = await sites(world)
    pulls = [ahead(world, PROMPT[:2]) for _ in range(8)]
    for pull in pulls:
        gateway.channel.send(pull)
    await until(lambda: pd.node.inbound.known.num_open == len(pulls))
    await waits(prfaas)
    await asyncio.gather(*(prefill.store([key]) for key in PROMPT[:2]))
    await until(lambda: len(ends(gateway)) == len(pulls))
    assert {event.state for event in ends(gateway)} == {"committed"}
    assert num_waits(prfaas) == 0
    gateway.channel.close("done")
