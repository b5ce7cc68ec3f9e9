"""Events for a subscriber: an index made of them equals the store."""

import socket

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.errors import ConfigError
from prfaas.pool.store.event_feed import FeedLimits
from prfaas.wire.channel import ChannelLimits
from prfaas.wire.messages.codec import AnyMessage
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.gateway import (
    Evicted,
    PoolState,
    Snapshot,
    SnapshotEnd,
    Stored,
    Subscribe,
    TransferEnded,
)
from prfaas.wire.messages.layouts import layout_spec
from tests.pool.conftest import World
from tests.pool.sites import FACTS, LAYOUT, LOOPBACK, PROMPT, Peer, content, dial, subscribe, until

Event = Stored | Evicted | TransferEnded | PoolState
MANY = [BlockKey(0, bytes([n, m] * 16)) for n in range(10) for m in range(10)]


def events_of(peer: Peer) -> list[Event]:
    return [message for message in peer.messages if isinstance(message, Event)]


def followed(messages: list[AnyMessage]) -> tuple[PrefixIndex, set[BlockKey]]:
    """Apply a stream as a gateway would; raises where the sequence breaks."""
    index, held, expected = PrefixIndex(), set[BlockKey](), -1
    for message in messages:
        match message:
            case Snapshot():
                index.add("pool", message.layout_id, keys_of(message.keys))
                held |= set(keys_of(message.keys))
            case SnapshotEnd():
                index.end_snapshot("pool")
                expected = message.next_seq
            case Stored() | Evicted() | TransferEnded() | PoolState():
                assert message.seq == expected
                expected += 1
        if isinstance(message, Stored):
            index.add("pool", message.layout_id, keys_of(message.keys))
            held |= set(keys_of(message.keys))
        elif isinstance(message, Evicted):
            index.remove("pool", message.layout_id, keys_of(message.keys))
            held -= set(keys_of(message.keys))
    return index, held


async def test_facts_of_layouts_are_told_once_to_every_subscriber(world: World) -> None:
    pd = await world.start_pd()
    early = await subscribe(pd, world.identities)
    engine = await world.engine("pd-pool")
    assert await engine.store(MANY[:3])
    late = await subscribe(pd, world.identities)
    expected = [(LAYOUT.layout_id, FACTS, "org/name@0123")]
    for peer in (early, late):
        await until(lambda peer=peer: any(told(peer)))  # type: ignore[misc]
        assert expected in told(peer)
    num_told = len(told(early))
    pd.node._state_changed()
    await until(lambda: [] in told(early)[num_told:])


def told(peer: Peer) -> list[list[tuple[bytes, dict[str, str], str]]]:
    """Facts in each of the states that a gateway was told."""
    return [
        [(each.layout_id, each.facts, each.model) for each in message.facts]
        for message in peer.messages
        if isinstance(message, PoolState)
    ]


async def test_a_subscriber_follows_stores_and_evictions(world: World) -> None:
    pd = await world.start_pd(memory_bytes=20 * len(content(MANY[0])), feed=FeedLimits(keys_max=4))
    engine = await world.engine("pd-pool")
    assert await engine.store(MANY[:10])
    early = await subscribe(pd, world.identities)
    await until(lambda: events_of(early))
    assert [len(m.keys) for m in early.messages if isinstance(m, Snapshot)] == [4, 4, 2]
    assert await engine.store(MANY[10:50])
    late = await subscribe(pd, world.identities)
    assert await engine.store(MANY[50:100])
    last = MANY[99]
    await until(lambda: followed(early.messages)[1] == pd.held())
    await until(lambda: followed(late.messages)[1] == pd.held())
    for peer in (early, late):
        index, held = followed(peer.messages)
        assert last in held
        assert len(held) == index.num_blocks("pool") == 20
    assert any(isinstance(event, Evicted) for event in events_of(early))
    for peer in (early, late):
        peer.channel.close("done")


async def test_a_subscriber_learns_what_tiers_hold_and_who_is_waited_for(world: World) -> None:
    _, pd, prefill, decode = await world.two_sites()
    watch = await subscribe(pd, world.identities)

    def told() -> PoolState | None:
        return next((e for e in reversed(events_of(watch)) if isinstance(e, PoolState)), None)

    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: (state := told()) is not None and state.num_leased == len(PROMPT))
    state = told()
    assert state is not None
    (name, tier), *others = state.tiers.items()
    assert (name, others) == ("host", [])
    assert tier.used_bytes == pd.node.store.room.used_bytes == sum(len(content(k)) for k in PROMPT)
    assert state.leased_bytes == tier.used_bytes
    assert (tier.capacity_bytes, tier.num_blocks) == (
        pd.node.store.room.capacity_bytes,
        len(PROMPT),
    )
    assert await decode.load(PROMPT) == [True] * len(PROMPT)
    await until(lambda: (state := told()) is not None and not state.num_leased)
    state = told()
    assert state is not None
    assert state.leased_bytes == 0
    watch.channel.close("done")


async def test_a_subscriber_learns_of_engines_links_and_transfers(world: World) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    watch = await subscribe(prfaas, world.identities)
    await until(lambda: events_of(watch))
    (state,) = events_of(watch)
    assert isinstance(state, PoolState)
    assert state.links == {"pd-pool": True}
    assert state.layouts == {"engine-of-prfaas-pool": layout_spec(LAYOUT)}
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    ended = await transfer_end(watch)
    assert ended.transfer_id == transfer
    assert (ended.direction, ended.peer, ended.state) == ("sent", "pd-pool", "committed")
    assert ended.num_blocks == len(PROMPT)
    assert ended.num_bytes == sum(len(content(key)) for key in PROMPT)
    assert 0 <= ended.last_block_age_ns <= ended.duration_ns
    await pd.kill()
    await until(
        lambda: any(
            isinstance(event, PoolState) and event.links == {"pd-pool": False}
            for event in events_of(watch)
        )
    )
    followed(watch.messages)
    watch.channel.close("done")


async def transfer_end(peer: Peer) -> TransferEnded:
    def ends() -> list[TransferEnded]:
        return [event for event in events_of(peer) if isinstance(event, TransferEnded)]

    await until(ends)
    return ends()[0]


async def test_subscribing_twice_does_not_double_the_events(world: World) -> None:
    pd = await world.start_pd()
    engine = await world.engine("pd-pool")
    peer = await subscribe(pd, world.identities)
    peer.channel.send(Subscribe(gateway="gateway"))
    assert await engine.store(PROMPT[:1])
    await until(lambda: bool(peer.of(Stored)))
    assert await engine.store(PROMPT[1:2])
    await until(lambda: len(peer.of(Stored)) >= 2)
    assert (len(peer.of(SnapshotEnd)), len(peer.of(Stored))) == (1, 2)
    peer.channel.close("done")


async def test_changes_that_follow_each_other_go_together(world: World) -> None:
    """An event has the last change of its blocks, and precedes later events."""
    pd = await world.start_pd()
    peer = await subscribe(pd, world.identities)
    await until(lambda: len(events_of(peer)) == 1)
    feed, layout, other = pd.node.feed, b"L" * 32, b"M" * 32
    a, b, c = MANY[:3]
    for key in (a, b, c):
        feed.stored(layout, [key])
    feed.stored(other, [a])
    feed.evicted(layout, [b])
    feed.evicted(layout, [a])
    feed.stored(layout, [a])
    feed.state_changed(PoolState(seq=0, layouts={}, links={}))
    feed.stored(layout, [b])
    await until(lambda: len(events_of(peer)) == 6)
    told = [
        (type(event), event.layout_id, set(keys_of(event.keys)))
        for event in events_of(peer)
        if isinstance(event, Stored | Evicted)
    ]
    assert told == [
        (Evicted, layout, {b}),
        (Stored, layout, {a, c}),
        (Stored, other, {a}),
        (Stored, layout, {b}),
    ]
    assert isinstance(events_of(peer)[4], PoolState)
    followed(peer.messages)
    peer.channel.close("done")


async def test_a_snapshot_leaves_no_faster_than_it_is_read(world: World) -> None:
    """It is larger than all buffers; what happens meanwhile comes after it."""
    limits = ChannelLimits(write_buffer_bytes=1 << 16, unread_bytes_max=1 << 19)
    pd = await world.start_pd(memory_bytes=1 << 30, channels=limits)
    store = pd.node.store
    for n in range(40_000):
        store.put(b"L" * 32, BlockKey(0, n.to_bytes(32, "big")), b"x", b"")
    peer = await dial(pd, world.identities, "gateway")
    await until(lambda: pd.node.inbound.channels.of("gateway") is not None)
    served = pd.node.inbound.channels.of("gateway")
    assert served is not None
    assert served.socket is not None
    assert peer.channel.socket is not None
    served.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    peer.channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    peer.channel.pause_reading()
    peer.channel.send(Subscribe(gateway="gateway"))
    await until(lambda: served.backlog_bytes > limits.write_buffer_bytes)
    for n in range(40_000, 40_010):
        store.put(b"L" * 32, BlockKey(0, n.to_bytes(32, "big")), b"x", b"")
    assert not peer.of(Snapshot)
    peer.channel.resume_reading()
    await until(lambda: followed(peer.messages)[1] == pd.held())
    assert served.is_open
    index, held = followed(peer.messages)
    assert held == pd.held()
    assert index.num_blocks("pool") == 40_010
    peer.channel.close("done")


async def test_a_subscriber_that_misses_too_much_during_its_snapshot_is_dropped(
    world: World,
) -> None:
    pd = await world.start_pd(feed=FeedLimits(backlog_keys_max=3))
    peer = await dial(pd, world.identities, "gateway")
    await until(lambda: pd.node.inbound.channels.of("gateway") is not None)
    served, feed = pd.node.inbound.channels.of("gateway"), pd.node.feed
    assert served is not None
    state = PoolState(seq=0, layouts={}, links={})
    feed.subscribe(served, pd.node.store, lambda: state)
    feed.stored(b"L" * 32, MANY[:3])
    feed.state_changed(state)
    assert served.is_open
    feed.stored(b"L" * 32, MANY[:1])
    feed.state_changed(state)
    await until(lambda: bool(peer.closed))
    await until(lambda: not feed.num_subscribers)


async def test_a_subscriber_that_does_not_keep_up_is_dropped(world: World) -> None:
    pd = await world.start_pd(feed=FeedLimits(backlog_bytes_max=-1))
    peer = await subscribe(pd, world.identities)
    await until(lambda: bool(peer.of(PoolState)))
    engine = await world.engine("pd-pool")
    await until(lambda: bool(peer.closed))
    assert await engine.store(PROMPT)


@pytest.mark.parametrize("which", ["listen", "admin", "socket_path"])
async def test_a_place_that_can_not_be_had_is_one_clear_mistake(world: World, which: str) -> None:
    pd = await world.start_pd()
    if which == "socket_path":
        place: object = world.sockets / "no" / "such" / "pool.sock"
        shown = "no/such/pool.sock"
    else:
        place, shown = (LOOPBACK, pd.port), str(pd.port)
    with pytest.raises(ConfigError, match=shown):
        await world.start("prfaas-pool", **{which: place})
