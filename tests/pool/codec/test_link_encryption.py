"""Protection of the data connections of a link, over sockets: what ends agree on, and attacks."""

from __future__ import annotations

import asyncio
import gc
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest

from prfaas.core.codec.codecs import LinkCodec
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.link_encryption import WIRE_NAMES, LinkEncryption
from prfaas.core.transfer.link_scheduler import Fragment, OutgoingBlock
from prfaas.pool.codec.loading import KERNELS
from prfaas.pool.net.link_end import SendLimits
from prfaas.wire.fragments import block_digest, encode_prefix
from prfaas.wire.messages.link import Commit, PoolHello, Resumed
from prfaas.wire.sealed.keys import LinkSecret
from prfaas.wire.sealed.records import OPENING_BYTES, Sealer
from prfaas.wire.sealed.streams import SealedParts
from tests.pool.coded_pair import MODEL, Pair
from tests.pool.coded_pair import a_block as a_number_block
from tests.pool.conftest import World
from tests.pool.link_rig import MEMORY, Rig
from tests.pool.sites import LAYOUT, LOOPBACK, PROMPT, Peer, Site, content, dial, offer, until
from tests.pool.taps import Tap

SEALED, TLS, NETWORK = LinkEncryption.SEALED, LinkEncryption.TLS, LinkEncryption.NETWORK
BOTH = [SEALED, NETWORK]
TRANSFER = bytes(range(16))


class OneByte:
    """Changes one byte of one data connection."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self.number: int | None = None
        """The connection."""

    def __call__(self, number: int, data: bytes) -> bytes:
        is_data = self._tap.carried[number][:4] == b"PFKS" and len(data) >= 1000
        if self.number is not None or not is_data:
            return data
        self.number = number
        return data[:500] + bytes([data[500] ^ 1]) + data[501:]


async def linked(
    world: World,
    tap: Tap,
    sender: LinkEncryption,
    receiver: LinkEncryption,
    connections: int = 2,
    **settings: object,
) -> Rig:
    pd = await world.start("pd-pool", memory_bytes=MEMORY, link_encryption=receiver, **settings)
    tap.target = pd.port
    prfaas = await world.start(
        "prfaas-pool",
        memory_bytes=MEMORY,
        link_encryption=sender,
        link_connections={"pd-pool": connections},
        peers={"pd-pool": (LOOPBACK, tap.port)},
        **settings,
    )
    rig = Rig(tap, prfaas, pd, world.identities)  # type: ignore[arg-type]
    await until(lambda: rig.link.telemetry.num_connections == connections)
    return rig


async def moved(rig: Rig, count: int = 4) -> list[bytes]:
    transfer = rig.begin()
    blocks = rig.push(transfer, count)
    rig.link.finish(transfer)
    await rig.all_there(blocks)
    return [bytes(block.data) for block in blocks.values()]


def shown(site: Site, peer: str, direction: str) -> list[LinkEncryption]:
    """Protection that a pool node's metrics have for a link."""
    labels = {"peer": peer, "direction": direction}
    return [
        each
        for each in LinkEncryption
        if site.metric("link_encryption", encryption=each.value, **labels)
    ]


@pytest.mark.parametrize(
    ("sender", "receiver", "used"),
    [
        (SEALED, SEALED, SEALED),
        (NETWORK, NETWORK, NETWORK),
        (TLS, TLS, TLS),
        (SEALED, NETWORK, SEALED),
        (NETWORK, SEALED, SEALED),
        (SEALED, TLS, TLS),
        (TLS, SEALED, TLS),
    ],
)
async def test_blocks_arrive_by_the_protection_that_both_ends_allow(
    world: World,
    tap: Tap,
    sender: LinkEncryption,
    receiver: LinkEncryption,
    used: LinkEncryption,
) -> None:
    rig = await linked(world, tap, sender, receiver)
    blocks = await moved(rig)
    assert rig.link.telemetry.encryption == used
    await until(lambda: shown(rig.prfaas, "pd-pool", "sent") == [used])
    await until(lambda: shown(rig.pd, "prfaas-pool", "received") == [used])
    wire = b"".join(map(bytes, tap.carried.values()))
    assert [block[:64] in wire for block in blocks] == [used is NETWORK] * len(blocks)
    assert bool(tap.data_connections()) == (used is not TLS)
    assert rig.pd.metric("connections_refused_total", port="link") == 0


@pytest.mark.parametrize("encryption", BOTH)
async def test_coded_blocks_arrive_bit_by_bit(
    world: World, tap: Tap, encryption: LinkEncryption
) -> None:
    rig = await linked(world, tap, encryption, encryption, link_codec=LinkCodec.ALWAYS)
    for site in (rig.pd, rig.prfaas):
        site.node.link_room.layouts.learn(MODEL)
    pair = Pair(tap, rig.prfaas, rig.pd, world.identities)  # type: ignore[arg-type]
    await until(lambda: pair.is_agreed and KERNELS.window is not None)
    await pair.move([a_number_block(number) for number in range(4)])
    block_bytes, wire_bytes = pair.moved()
    assert block_bytes / wire_bytes > 1.3


@pytest.mark.parametrize("encryption", BOTH)
async def test_a_byte_changed_on_the_path_ends_its_connection_and_not_the_link(
    world: World, tap: Tap, encryption: LinkEncryption
) -> None:
    """As with TLS: the peer has proved itself, and who is on the path could cut the link anyway."""
    rig = await linked(world, tap, encryption, encryption)
    tap.change = struck = OneByte(tap)
    await moved(rig)
    assert struck.number is not None
    assert rig.link.is_up
    assert rig.link.telemetry.encryption == encryption
    await until(lambda: rig.pd.metric("connections_refused_total", port="link") == 1)


async def test_a_path_that_carries_only_tls_gets_tls(
    world: World, tap: Tap, caplog: pytest.LogCaptureFixture
) -> None:
    tap.change = lambda number, data: None if not tap.carried[number] and data[0] != 0x16 else data
    rig = await linked(world, tap, SEALED, SEALED, send=SendLimits(redial_s=0.01))
    await until(lambda: rig.link.telemetry.encryption == TLS)
    await moved(rig)
    assert rig.pd.metric("connections_refused_total", port="link") == 0
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert logged == ["link_uses_tls peer=pd-pool"]
    # The next session does not try again what was of no use.
    num_plain = len(tap.carried)
    rig.link._dialer._channel.close("cut")  # type: ignore[union-attr]
    await until(lambda: len(tap.carried) >= num_plain + 3)
    await until(lambda: rig.link.telemetry.num_connections == 2)
    assert {bytes(data[:1]) for data in list(tap.carried.values())[num_plain:]} == {b"\x16"}


async def test_a_path_that_ends_what_is_no_tls_once_it_has_looked_into_it_gets_tls(
    world: World, tap: Tap
) -> None:
    """An inspecting firewall lets the first bytes of a connection pass, before it knows better."""

    def inspects(number: int, data: bytes) -> bytes | None:
        seen = tap.carried[number]
        return None if seen[:4] == b"PFKS" and len(seen) + len(data) > 1000 else data

    tap.change = inspects
    rig = await linked(world, tap, SEALED, SEALED, send=SendLimits(redial_s=0.01))
    opened = dict.fromkeys(rig.link._dialer._senders.connections, OPENING_BYTES)  # type: ignore[union-attr]
    await until(lambda: rig.pd.node.link_port.data.received("prfaas-pool") == opened)
    rig.link._dialer._senders.received(opened, 1)  # type: ignore[union-attr]
    await moved(rig)
    assert rig.link.telemetry.encryption == TLS


async def test_a_path_that_has_carried_blocks_keeps_its_protection_through_a_bad_time(
    world: World, tap: Tap
) -> None:
    rig = await linked(world, tap, SEALED, SEALED, send=SendLimits(redial_s=0.01))
    senders = rig.link._dialer._senders
    assert senders is not None
    senders.received(dict.fromkeys(senders.connections, 1 << 20), 1)
    rig.link._dialer._channel.close("cut")  # type: ignore[union-attr]
    num_before = len(tap.carried)
    bad = range(num_before + 1, num_before + 9)
    tap.change = lambda number, data: None if number in bad and data[:4] == b"PFKS" else data
    await until(lambda: len(tap.carried) > bad[-1] and rig.link.telemetry.num_connections == 2)
    await moved(rig)
    assert rig.link.telemetry.encryption == SEALED


async def test_connections_that_a_peer_has_no_room_for_say_nothing_of_the_path(
    world: World, tap: Tap
) -> None:
    rig = await linked(world, tap, SEALED, SEALED, connections=6)

    def has(num_connections: int) -> bool:
        return rig.link.telemetry.num_connections == num_connections

    for num_max in (1, 6, 1, 6, 1, 6, 1):
        rig.link.control.allow(num_max)
        await until(partial(has, num_max))
    await moved(rig)
    assert rig.link.telemetry.encryption == SEALED


# --- a destination and attackers ---


@dataclass
class Attacker:
    """A source with an identity, whose data connections are made by hand."""

    peer: Peer
    pd: Site
    secret: LinkSecret
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def close(self) -> None:
        self.peer.channel.close("done")
        for writer in self.writers:
            writer.transport.abort()

    async def send(self, *parts: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(LOOPBACK, self.pd.port)
        self.writers.append(writer)
        for part in parts:
            writer.write(part)
        await writer.drain()
        return reader

    def fragment(self, sealer: Sealer, key: BlockKey = PROMPT[0]) -> bytes:
        data = content(key)
        name = LAYOUT.layout_id, key
        whole = OutgoingBlock(TRANSFER, name, block_digest(name[0], key, data), data)
        prefix = encode_prefix(Fragment(whole, 0, len(data)))
        return b"".join(SealedParts(sealer).parts(memoryview(prefix), memoryview(data)))


async def attacker(world: World, pd: Site, encryption: LinkEncryption = SEALED) -> Attacker:
    peer = await dial(pd, world.identities, "prfaas-pool")
    word = secrets.token_hex(8)
    names = [WIRE_NAMES[encryption]]
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link=word, encryptions=names))
    await until(lambda: bool(peer.of(Resumed)))
    (resumed,) = peer.of(Resumed)
    assert isinstance(resumed, Resumed)
    assert resumed.secret not in repr(resumed).encode("latin-1")
    secret = LinkSecret(encryption, "prfaas-pool", "pd-pool", word, resumed.secret)
    peer.channel.send(offer(world.identities, TRANSFER))
    return Attacker(peer, pd, secret)


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """Bytes that come until a connection ends, orderly or not."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


@pytest.mark.parametrize("encryption", BOTH)
async def test_a_recorded_connection_cannot_be_played_again(
    world: World, encryption: LinkEncryption
) -> None:
    pd = await world.start_pd(link_encryption=encryption)
    one = await attacker(world, pd, encryption)
    sealer = Sealer(one.secret, 1)
    recorded = sealer.opening + one.fragment(sealer)
    reader = await one.send(recorded)
    one.peer.channel.send(Commit(transfer_id=TRANSFER, num_blocks=1))
    await until(lambda: PROMPT[0] in pd.held())
    assert await end_of(await one.send(recorded)) == b""
    await until(lambda: pd.metric("connections_refused_total", port="link") == 1)
    # Nor in another session of the same peer.
    other = await attacker(world, pd, encryption)
    assert await end_of(await other.send(recorded)) == b""
    await until(lambda: pd.metric("connections_refused_total", port="link") == 2)
    assert pd.node.inbound.channels.is_connected("prfaas-pool")
    assert await end_of(reader) == b""  # Its session is over.
    one.close()
    other.close()


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda s, o: b"PFKS" + bytes(OPENING_BYTES - 4), id="zeros"),
        pytest.param(lambda s, o: s.opening[:-1] + b"!", id="a wrong proof"),
        pytest.param(lambda s, o: s.opening[:24] + bytes(8) + s.opening[32:], id="another number"),
        pytest.param(lambda s, o: o.opening, id="of no session"),
        pytest.param(lambda s, o: s.opening[:4] + b"\2" + s.opening[5:], id="another version"),
    ],
)
async def test_a_caller_without_the_secret_is_refused(  # type: ignore[no-untyped-def]
    world: World, attack
) -> None:
    pd = await world.start_pd(link_encryption=SEALED)
    one = await attacker(world, pd)
    strange = LinkSecret(SEALED, "prfaas-pool", "pd-pool", "word", b"s" * 32)
    reader = await one.send(attack(Sealer(one.secret, 7), Sealer(strange, 7)), bytes(5000))
    assert await end_of(reader) == b""
    await until(lambda: pd.metric("connections_refused_total", port="link") == 1)
    assert not pd.held()
    # The number that was named without proof is free.
    sealer = Sealer(one.secret, 7)
    await one.send(sealer.opening + one.fragment(sealer))
    one.peer.channel.send(Commit(transfer_id=TRANSFER, num_blocks=1))
    await until(lambda: PROMPT[0] in pd.held())
    one.close()


async def test_a_pool_node_by_tls_alone_gives_out_no_secret(world: World) -> None:
    pd = await world.start_pd(link_encryption=TLS)
    peer = await dial(pd, world.identities, "prfaas-pool")
    names = list(WIRE_NAMES.values())
    peer.channel.send(PoolHello(pool="prfaas-pool", epoch="e", link="l", encryptions=names))
    await until(lambda: bool(peer.of(Resumed)))
    (resumed,) = peer.of(Resumed)
    assert isinstance(resumed, Resumed)
    assert (resumed.encryption, resumed.secret) == ("", b"")
    peer.channel.close("done")


async def test_a_cut_within_a_block_leaves_nothing_and_the_block_can_come_again(
    world: World,
) -> None:
    pd = await world.start_pd(link_encryption=SEALED)
    one = await attacker(world, pd)
    sealer = Sealer(one.secret, 1)
    await one.send(sealer.opening + one.fragment(sealer)[:-5])
    one.writers[0].close()
    again = Sealer(one.secret, 2)
    await one.send(again.opening + one.fragment(again))
    one.peer.channel.send(Commit(transfer_id=TRANSFER, num_blocks=1))
    await until(lambda: PROMPT[0] in pd.held())
    one.close()
    assert pd.node.link_port.data.unfinished_bytes == 0


@pytest.mark.parametrize("encryption", BOTH)
async def test_a_changed_byte_leaves_no_memory_to_the_garbage_collector(
    world: World, encryption: LinkEncryption
) -> None:
    pd = await world.start_pd(link_encryption=encryption)
    one = await attacker(world, pd, encryption)
    sealer = Sealer(one.secret, 1)
    data = bytearray(sealer.opening + one.fragment(sealer))
    data[-1] ^= 1
    gc.collect()
    gc.disable()
    try:
        reader = await one.send(bytes(data))
        assert await end_of(reader) == b""
        one.close()
        await until(lambda: not pd.node.store.room.loose_bytes)
    finally:
        gc.enable()
