"""More data connections than a pool node takes: each link has its share, and none breaks."""

import asyncio
from pathlib import Path

import pytest

from prfaas.core.transfer.link_encryption import LinkEncryption
from prfaas.pool.receive.inbound_transfers import ReceiveLimits
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.messages.codec import encode
from prfaas.wire.messages.link import Connections, Join, PoolHello, Resumed
from tests.pool.conftest import World
from tests.pool.sites import LOOPBACK, PROMPT, Site, dial, until

NUM_HOSTS, WANTED, LIMIT = 12, 16, 64
NAMES = [f"prfaas-{number}" for number in range(NUM_HOSTS)]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Identities of a PD host and many PrfaaS hosts."""
    directory = tmp_path_factory.mktemp("many")
    make_authority(directory)
    for name in ("gateway", "pd-pool", *NAMES):
        make_identity(directory, name)
    return directory


def num_open(site: Site) -> int:
    senders = site.node.links["pd-pool"]._dialer._senders
    return senders.num_open if senders is not None else 0


async def sender(world: World, many: Path, pd: Site, name: str, **settings: object) -> Site:
    return await world.start(
        name,
        identity=identity_in(many, name),
        peers={"pd-pool": (LOOPBACK, pd.port)},
        link_connections={"pd-pool": WANTED},
        **settings,
    )


async def receiver(world: World, many: Path, **settings: object) -> Site:
    return await world.start(
        "pd-pool",
        identity=identity_in(many, "pd-pool"),
        sources=frozenset(NAMES),
        receive=ReceiveLimits(connections_max=LIMIT),
        **settings,
    )


@pytest.mark.parametrize("kind", [LinkEncryption.TLS, LinkEncryption.SEALED])
async def test_links_share_the_connections_of_a_node_and_take_more_when_others_leave(
    world: World, many: Path, kind: LinkEncryption
) -> None:
    pd = await receiver(world, many, link_encryption=kind)
    first = await sender(world, many, pd, NAMES[0], link_encryption=kind)
    await until(lambda: num_open(first) == WANTED)
    sites = [first]
    for name in NAMES[1:]:
        sites.append(await sender(world, many, pd, name, link_encryption=kind))
    share = LIMIT // NUM_HOSTS
    await until(lambda: [num_open(site) for site in sites] == [share] * NUM_HOSTS)
    data = pd.node.link_port.data
    await until(lambda: len(data._receivers) == share * NUM_HOSTS)
    assert all(site.node.links["pd-pool"].is_up for site in sites)
    for site in sites[2:]:
        await site.kill()
    await until(lambda: [num_open(site) for site in sites[:2]] == [WANTED] * 2)


async def test_a_transfer_goes_on_while_its_link_gives_connections_up(
    world: World, many: Path
) -> None:
    pd = await receiver(world, many)
    made = World(many, world.sockets, world.relay)
    first = await sender(made, many, pd, NAMES[0])
    await until(lambda: num_open(first) == WANTED)
    engine, decode = await made.engine(NAMES[0]), await made.engine("pd-pool")
    transfer = engine.push(source=NAMES[0])
    assert await engine.store(PROMPT[:5], transfer)
    others = [await sender(made, many, pd, name) for name in NAMES[1:]]
    await until(lambda: num_open(first) == LIMIT // NUM_HOSTS)
    assert await engine.store(PROMPT[5:], transfer)
    engine.push_done(transfer)
    await until(lambda: pd.held() == set(PROMPT))
    await until(lambda: first.metric("transfers_total", direction="sent", state="committed") == 1)
    for each in (engine, decode):
        await asyncio.to_thread(each.close)
    for site in (first, *others):
        await site.kill()


def is_over(reader: asyncio.StreamReader) -> bool:
    """Return True if the other end has closed; with bytes unread it resets."""
    return reader.at_eof() or reader.exception() is not None


async def test_an_older_sender_keeps_its_link_with_the_connections_of_its_share(
    world: World, many: Path
) -> None:
    """It is not told, and its surplus is closed without a word against it."""
    pd = await receiver(world, many)
    peer = await dial(pd, many, NAMES[0])
    peer.channel.send(PoolHello(pool=NAMES[0], epoch="e", link="word"))
    await until(lambda: peer.of(Resumed))
    tls = identity_in(many, NAMES[0]).dialling().data
    limit = pd.node.link_port.data.share
    ends = []
    for number in range(limit + 5):
        reader, writer = await asyncio.open_connection(LOOPBACK, pd.port, ssl=tls)
        writer.write(encode(Join(pool=NAMES[0], link="word", number=number)))
        ends.append((reader, writer))
    await until(lambda: sum(is_over(reader) for reader, _ in ends) == 5)
    await until(lambda: len(pd.node.link_port.data._receivers) == limit)
    assert not peer.closed
    assert not peer.of(Connections)
    assert pd.metric("connections_refused_total", port="link") == 0
    for _, writer in ends:
        writer.transport.abort()
    peer.channel.close("done")
