"""A pool node that is about to stop: what is under way arrives, nothing new begins."""

import asyncio

from prfaas.wire.messages.gateway import PoolState, TransferEnded
from prfaas.wire.messages.link import Refused

from .conftest import World
from .sites import PROMPT, offer, source, subscribe, until


async def test_transfers_under_way_arrive(world: World) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    gateway = await subscribe(pd, world.identities)
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:4], transfer)
    await until(lambda: pd.node.inbound.known.num_open == 1)
    drains = [asyncio.create_task(site.node.drain(60.0)) for site in (prfaas, pd)]
    await until(lambda: any(state.is_draining for state in states(gateway)))
    assert not any(drain.done() for drain in drains)
    assert await prefill.store(PROMPT[4:], transfer)
    prefill.push_done(transfer)
    await asyncio.gather(*drains)
    assert pd.held() == set(PROMPT)
    assert await decode.load(PROMPT) == [True] * len(PROMPT)


async def test_nothing_new_begins(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    at_source = await subscribe(prfaas, world.identities)
    await asyncio.gather(prfaas.node.drain(60.0), pd.node.drain(60.0))
    transfer = prefill.push()
    await until(lambda: at_source.of(TransferEnded))
    [ended] = at_source.of(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert (ended.transfer_id, ended.state, ended.reason) == (transfer, "refused", "draining")
    peer = await source(pd, world.identities)
    peer.channel.send(offer(world.identities, b"n" * 16))
    await until(lambda: peer.of(Refused))
    assert pd.metric("tickets_refused_total", end="destination", reason="draining") == 1


async def test_what_does_not_end_is_left_when_the_time_is_over(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    transfer = prefill.push()
    await until(lambda: pd.node.inbound.known.num_open == 1)
    await prfaas.node.drain(0.05)
    assert prfaas.node.link_room.num_open == 1
    prefill.push_done(transfer)
    await until(lambda: prfaas.node.link_room.num_open == 0)


def states(gateway: object) -> list[PoolState]:
    return [message for message in gateway.messages if isinstance(message, PoolState)]  # type: ignore[attr-defined]
