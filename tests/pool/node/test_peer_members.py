"""Peers of pool nodes join, leave and change their address while blocks are on their way."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.cli.parts.pool_settings import follow_sources
from prfaas.config.load import load_deployment
from prfaas.core.membership.members import Listed, Member, MemberKind, RefusalCause, State
from prfaas.errors import ConfigError
from prfaas.membership.deployment_file import DeploymentFile, peer_view
from prfaas.membership.folder import Folder
from prfaas.membership.peer_entries import PeerClusters, peer_clusters, peer_entries
from prfaas.pool.node.peer_members import PeerMembers
from prfaas.wire.channel import SILENCE_MAX_S
from prfaas.wire.identity import make_authority, make_identity
from prfaas.wire.messages.base import Goodbye, Ping
from prfaas.wire.messages.gateway import Stored
from prfaas.wire.messages.link import Committed
from tests.pool.conftest import World
from tests.pool.sites import LOOPBACK, PROMPT, Relay, Site, source, subscribe, until

PUSHES = PeerClusters(frozenset({"pd"}), frozenset())
ACCEPTS = PeerClusters(frozenset({"pd"}), frozenset({"pd", "prfaas"}))
NOBODY: dict[str, object] = {"peers": {}, "sources": frozenset()}


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    directory = tmp_path / "identities"
    make_authority(directory)
    for name in ("gateway", "prfaas-pool", "pd-pool", "pd-pool-2"):
        make_identity(directory, name)
    return directory


def at(name: str, port: int, cluster: str = "pd") -> Member:
    return Member(name, MemberKind.POOL, cluster, f"{LOOPBACK}:{port}")


class Followed:
    """A pool node that follows the lists of a test."""

    def __init__(self, site: Site, clusters: PeerClusters) -> None:
        self.members = PeerMembers(site.node.peers, clusters, [])
        self.node, self.machine = site.node, self.members.follower.machine

    def list(self, *members: Member) -> None:
        self.members.follower.listed("test", [Listed(each) for each in members])

    def is_up(self, peer: str) -> bool:
        return peer in self.node.links and self.node.links[peer].is_up


@asynccontextmanager
async def followed(site: Site, clusters: PeerClusters) -> AsyncIterator[Followed]:
    made = Followed(site, clusters)
    made.members.start()
    try:
        yield made
    finally:
        await made.members.close()


def committed(site: Site, number: int) -> Callable[[], bool]:
    counted = {"direction": "received", "state": "committed"}
    return lambda: site.metric("transfers_total", **counted) == number


def series_of(site: Site, peer: str) -> list[str]:
    return [
        sample.name
        for metric in site.node.metrics.registry.collect()
        for sample in metric.samples
        if sample.labels.get("peer") == peer
    ]


async def test_a_peer_that_joins_is_dialled_and_takes_blocks(world: World) -> None:
    pd = await world.start_pd(**NOBODY)
    prfaas = await world.start("prfaas-pool", **NOBODY)
    prefill, decode = await world.engine("prfaas-pool"), await world.engine("pd-pool")
    async with followed(prfaas, PUSHES) as sender, followed(pd, ACCEPTS) as receiver:
        assert not prfaas.node.links
        receiver.list(at("prfaas-pool", 1, "prfaas"))
        sender.list(at("pd-pool", world.relay.port))
        await until(lambda: sender.is_up("pd-pool"))
        transfer = prefill.push()
        assert await prefill.store(PROMPT, transfer)
        prefill.push_done(transfer)
        await until(committed(pd, 1))
        assert await decode.load(PROMPT) == [True] * len(PROMPT)
        pd.node.metrics.on_read()
        ready = {"kind": "pool", "state": "ready"}
        assert pd.metric("pool_members", **ready) == 1


async def test_a_peer_that_leaves_drains_and_leaves_nothing_behind(world: World) -> None:
    pd = await world.start_pd(**NOBODY)
    prfaas = await world.start("prfaas-pool", **NOBODY)
    prefill = await world.engine("prfaas-pool")
    gateway = await subscribe(prfaas, world.identities)
    before = set(asyncio.all_tasks())
    async with followed(prfaas, PUSHES) as sender, followed(pd, ACCEPTS) as receiver:
        receiver.list(at("prfaas-pool", 1, "prfaas"))
        sender.list(at("pd-pool", world.relay.port))
        await until(lambda: sender.is_up("pd-pool"))
        link = weakref.ref(prfaas.node.links["pd-pool"])
        transfer = prefill.push()
        assert await prefill.store(PROMPT, transfer)
        await until(lambda: pd.node.inbound.known.num_open == 1)
        sender.list()
        receiver.list()
        for _ in range(3):
            sender.members.follower.drain()
            receiver.members.follower.drain()
        assert sender.machine.state_of("pd-pool") is State.DRAINING
        assert pd.node.inbound.channels.is_connected("prfaas-pool")
        prefill.push_done(transfer)
        await until(committed(pd, 1))
        await until(lambda: not prfaas.node.links)
        await until(lambda: receiver.machine.state_of("prfaas-pool") is None)
        await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
        await until(lambda: not series_of(prfaas, "pd-pool"))
        await until(lambda: not series_of(pd, "prfaas-pool"))
        await until(lambda: gc.collect() >= 0 and link() is None)
    gateway.channel.close("the test is over")
    await until(lambda: not {t for t in asyncio.all_tasks() - before if "link" in repr(t)})


async def test_a_pool_that_left_may_not_push_any_more(world: World) -> None:
    pd = await world.start_pd(**NOBODY)
    await world.start("prfaas-pool")
    async with followed(pd, ACCEPTS) as receiver:
        receiver.list(at("prfaas-pool", 1, "prfaas"))
        await until(lambda: pd.node.inbound.channels.is_connected("prfaas-pool"))
        receiver.list()
        await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
        refused = pd.metric("connections_refused_total", port="link")
        await until(lambda: pd.metric("connections_refused_total", port="link") > refused)


async def test_a_pool_that_left_reads_the_end_of_its_transfer(world: World) -> None:
    """It reads late: the message waits in the memory of the other end."""
    pd = await world.start_pd(**NOBODY)
    async with followed(pd, ACCEPTS) as receiver:
        receiver.list(at("prfaas-pool", 1, "prfaas"))
        peer = await source(pd, world.identities)
        peer.channel.pause_reading()
        channel = pd.node.inbound.channels.of("prfaas-pool")
        assert channel is not None
        ahead = Stored(seq=0, layout_id=b"L" * 32, keys=[(0, b"h" * 32)] * 4096)
        while channel.backlog_bytes < 1 << 18:
            channel.send(ahead)
        channel.send(Committed(transfer_id=b"t" * 16))
        receiver.list()
        await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
        peer.channel.send(Ping())
        assert peer.of(Committed) == []

        peer.channel.resume_reading()

        await until(lambda: peer.of(Goodbye) or peer.closed)
        assert peer.of(Committed) == [Committed(transfer_id=b"t" * 16)]
        peer.pinging.cancel()
        peer.channel.close("the test is over")


async def test_a_source_closes_at_the_last_message_of_the_other_end(world: World) -> None:
    pd = await world.start_pd()
    prfaas = await world.start("prfaas-pool")
    await world.linked(prfaas, pd)
    channel = pd.node.inbound.channels.of("prfaas-pool")
    assert channel is not None

    channel.end("it is no member any more", limit_s=3600)

    async with asyncio.timeout(SILENCE_MAX_S - 1):  # Then it would close for silence.
        await until(lambda: channel not in pd.node.inbound.channels.tasks)
    await world.linked(prfaas, pd)


async def test_another_address_is_dialled_once_the_transfers_to_the_old_one_have_ended(
    world: World,
) -> None:
    pd = await world.start_pd(sources=frozenset({"prfaas-pool"}))
    prfaas = await world.start("prfaas-pool", **NOBODY)
    prefill, other = await world.engine("prfaas-pool"), Relay(pd.port)
    await other.open()
    async with followed(prfaas, PUSHES) as sender:
        sender.list(at("pd-pool", world.relay.port))
        await until(lambda: sender.is_up("pd-pool"))
        transfer = prefill.push()
        assert await prefill.store(PROMPT, transfer)
        await until(lambda: pd.node.inbound.known.num_open == 1)
        old = prfaas.node.links["pd-pool"]
        sender.list(at("pd-pool", other.port))
        for _ in range(3):
            sender.members.follower.drain()
        assert prfaas.node.links["pd-pool"] is old
        assert sender.machine.is_awaited("pd-pool")
        prefill.push_done(transfer)
        await until(committed(pd, 1))
        await until(lambda: prfaas.node.links.get("pd-pool") not in (None, old))
        await until(lambda: sender.is_up("pd-pool"))
        world.relay.cut()
        again = prefill.push()
        prefill.push_done(again, rest=PROMPT)
        await until(committed(pd, 2))
        assert series_of(prfaas, "pd-pool")
    await prfaas.kill()
    await other.close()


async def test_hosts_of_a_site_find_each_other(world: World) -> None:
    """Each dials the other, and what one pulls from the other is a copy."""
    first = await world.start("pd-pool", **NOBODY)
    second = await world.start("pd-pool-2", **NOBODY)
    async with followed(first, ACCEPTS) as one, followed(second, ACCEPTS) as two:
        members = at("pd-pool", first.port), at("pd-pool-2", second.port)
        one.list(*members)
        two.list(*members)
        await until(lambda: one.is_up("pd-pool-2") and two.is_up("pd-pool"))
        assert "pd-pool" not in first.node.links
        assert first.node.links.keys() == {"pd-pool-2"}


async def test_a_member_that_contradicts_is_refused_and_harms_nobody(world: World) -> None:
    pd = await world.start_pd()
    prfaas = await world.start("prfaas-pool")
    engine = Member("engine", MemberKind.ENGINE, "pd", "http://127.0.0.1:1", "pd-pool", "both")
    async with followed(prfaas, PUSHES) as sender:
        await world.linked(prfaas, pd)
        link = prfaas.node.links["pd-pool"]
        taken = at("pd-pool-2", world.relay.port)
        sender.list(at("pd-pool", 9), taken, at("elsewhere", 7, "other"), engine)
        reasons = {each.reason for each in sender.members.follower.refusals().values()}
        assert reasons == {RefusalCause.DUPLICATE_NAME, RefusalCause.ADDRESS_TAKEN}
        assert prfaas.node.links == {"pd-pool": link}
        assert link.is_up
        prfaas.node.metrics.on_read()
        assert prfaas.metric("pool_members_refused", reason="duplicate_name") == 1


async def test_member_files_set_the_budget_of_a_link(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "members"
    folder.mkdir()
    pd = await world.start_pd(sources=frozenset({"prfaas-pool"}))
    prfaas = await world.start("prfaas-pool", **NOBODY)
    source = Folder(folder, with_links=True, poll_s=0.01)
    members = PeerMembers(prfaas.node.peers, PUSHES, [source])
    members.start()
    text = f'kind = "pool"\ncluster = "pd"\naddress = "{LOOPBACK}:{pd.port}"\n'
    (folder / "pd-pool.toml").write_text(text + 'budget = "2Gbps"\nconnections = 3\n')
    await until(lambda: "pd-pool" in prfaas.node.links and prfaas.node.links["pd-pool"].is_up)
    telemetry = prfaas.node.links["pd-pool"].telemetry
    assert telemetry.budget_bits_per_s == 2_000_000_000
    (folder / "pd-pool.toml").unlink()
    await until(lambda: not prfaas.node.links)
    await members.close()


FILE = """
[model]
name = "m"
path = "m"
[routing]
offload_threshold = 1
[security]
identities = "."
[clusters.pd]
role = "pd"
{pd}
[clusters.pd.engines]
d = {{pool = "pd-pool", url = "http://127.0.0.1:1"}}
[clusters.far]
role = "prfaas"
[clusters.far.pools.prfaas-pool]
address = "127.0.0.1:2"
{links}
[clusters.far.engines]
p = {{pool = "prfaas-pool", url = "http://127.0.0.1:3"}}
"""


async def test_a_pool_node_follows_its_deployment_file(world: World, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"

    def write(links: str = "", **pools: int) -> None:
        tables = [
            f'[clusters.pd.pools.{name.replace("_", "-")}]\naddress = "{LOOPBACK}:{port}"'
            for name, port in pools.items()
        ]
        new = path.with_suffix(".new")
        new.write_text(FILE.format(pd="\n".join(tables), links=links))
        new.replace(path)

    allowed = {"peers": {}, "sources": frozenset({"prfaas-pool"})}
    pd = await world.start("pd-pool", **allowed)
    write(pd_pool=pd.port)
    deployment = load_deployment(path)
    clusters = peer_clusters(deployment, "prfaas-pool")
    assert clusters == PeerClusters(frozenset({"pd", "far"}), frozenset({"far"}))
    prfaas = await world.start("prfaas-pool", peers={"pd-pool": (LOOPBACK, pd.port)})
    links = prfaas.node.links
    source = DeploymentFile(
        (path,),
        lambda: load_deployment(path),
        deployment,
        peer_view("prfaas-pool", clusters, {}),
        0.01,
    )
    start = peer_entries(deployment, "prfaas-pool", clusters, {})
    members = PeerMembers(prfaas.node.peers, clusters, [source], start)
    members.start()
    await until(lambda: source.current_at_s > 0 and links["pd-pool"].is_up)
    kept, second = links["pd-pool"], await world.start("pd-pool-2", **allowed)
    write(pd_pool=pd.port, pd_pool_2=second.port)
    await until(lambda: "pd-pool-2" in links and links["pd-pool-2"].is_up)
    assert links["pd-pool"] is kept
    write(pd_pool=pd.port, pd_pool_2=pd.port)
    await until(lambda: "is the address of" in source.fault)
    assert links.keys() == {"pd-pool", "pd-pool-2"}
    write(pd_pool_2=second.port)
    await until(lambda: "pool 'pd-pool'" in source.fault)  # Its engine is still in the file.
    assert kept.is_up
    await members.close()


async def test_a_comment_in_a_file_without_addresses_changes_no_peer(
    world: World, tmp_path: Path
) -> None:
    """As under `prfaas up`, which chooses the addresses of pool nodes and gives them as options."""
    path = tmp_path / "site.toml"

    def write(comment: str) -> None:
        new = path.with_suffix(".new")
        text = FILE.format(pd="[clusters.pd.pools.pd-pool]", links="")
        new.write_text(text.replace('address = "127.0.0.1:2"', "") + comment)
        new.replace(path)

    write("")
    deployment = load_deployment(path)
    pd = await world.start("pd-pool", **NOBODY)
    prfaas = await world.start("prfaas-pool", peers={"pd-pool": (LOOPBACK, pd.port)})
    for site, given in ((pd, {}), (prfaas, {"pd-pool": (LOOPBACK, pd.port)})):
        name = site.node.settings.name
        clusters = peer_clusters(deployment, name)
        view = peer_view(name, clusters, given)
        source = DeploymentFile((path,), lambda: load_deployment(path), deployment, view)
        start = peer_entries(deployment, name, clusters, given)
        follower = PeerMembers(site.node.peers, clusters, [source], start).follower
        before = follower.machine.members()
        assert len(before) == 1
        write("# a comment\n")
        follower.listed("file", source._entries())
        assert follower.refusals() == {}
        assert follower.machine.members() == before
        assert not follower.machine.is_draining


def test_a_pool_node_that_is_not_in_its_file_any_more_is_told_to_stop(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(FILE.format(pd='[clusters.pd.pools.pd-pool]\naddress = "h:1"', links=""))
    with pytest.raises(ValueError, match="not in the file any more; stop it"):
        peer_clusters(load_deployment(path), "gone")


async def test_a_pool_node_process_follows_a_directory(world: World, tmp_path: Path) -> None:
    pd = await world.start_pd()
    folder, peers = tmp_path / "members", tmp_path / "peers.toml"
    folder.mkdir()
    peers.write_text(f'targets = ["pd"]\nfolder = "{folder}"\n')
    command = ["-m", "prfaas", "pool", "--name", "prfaas-pool", "--memory", "1MiB"]
    command += ["--listen", f"{LOOPBACK}:0", "--admin", f"{LOOPBACK}:0", "--gateway", "gateway"]
    command += ["--socket", str(tmp_path / "far.sock"), "--identities", str(world.identities)]
    command += ["--peers-from", str(peers)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        member = folder / "pd-pool.toml"
        member.with_suffix(".new").write_text(
            f'kind = "pool"\ncluster = "pd"\naddress = "{LOOPBACK}:{pd.port}"\n'
        )
        member.with_suffix(".new").rename(member)
        await until(lambda: pd.node.inbound.channels.is_connected("prfaas-pool"))
        member.unlink()
        await until(lambda: not pd.node.inbound.channels.is_connected("prfaas-pool"))
        assert process.returncode is None
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('targets = ["pd"]', "name a source of members"),
        ('folder = "x"', "name the clusters of the peers"),
        ('folder = "x"\ntargets = ["PD"]', "lower-case letters"),
        ('folder = "x"\ntarget = ["pd"]', "target"),
    ],
)
def test_a_wrong_file_of_peers_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        follow_sources(path)
