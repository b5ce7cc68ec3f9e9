"""Engines and pool nodes join, drain and leave while the gateway serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.config.load import load_deployment
from prfaas.core.membership.members import Listed, Member, MemberKind, RefusalCause, State
from prfaas.gateway.app import Gateway
from prfaas.gateway.engines.engine import Engine
from prfaas.membership.deployment_file import DeploymentFile, gateway_view
from prfaas.wire.identity import make_identity
from tests.gateway.conftest import LAYOUT, TIMING, World, until
from tests.gateway.ctl_runner import run
from tests.gateway.prompts import LONG, SHORT
from tests.gateway.scripted_engine import ScriptedEngine, hang
from tests.gateway.scripted_pool import ScriptedPool

POLL_S = 0.01


class Site:
    """The members around a gateway, as a source would list them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.entries = {each.name: Listed(each) for each in world.gateway.members.machine.members()}

    def engine(self, engine: ScriptedEngine, cluster: str = "pd", pool: str = "pd-pool") -> None:
        self.put(Member(engine.name, MemberKind.ENGINE, cluster, engine.url, pool, "both"))

    def put(self, member: Member, *, is_ready: bool = True) -> None:
        self.entries[member.name] = Listed(member, is_ready=is_ready)
        self.list()

    def not_ready(self, name: str) -> None:
        self.put(self.entries[name].member, is_ready=False)

    def drop(self, *names: str) -> None:
        for name in names:
            del self.entries[name]
        self.list()

    def list(self) -> None:
        self.world.gateway.members.listed("file", list(self.entries.values()))

    def state(self, name: str) -> State | None:
        return self.world.gateway.members.machine.state_of(name)


@asynccontextmanager
async def started(*parts: ScriptedEngine | ScriptedPool) -> AsyncIterator[None]:
    for part in parts:
        await part.start()
    try:
        yield
    finally:
        for part in parts:
            await part.stop()


async def test_an_engine_that_joins_gets_work(world: World) -> None:
    site, late = Site(world), ScriptedEngine("late")
    async with started(late):
        site.engine(late)
        await until(lambda: site.state("late") is State.READY)
        site.not_ready("decode")
        status, _ = await world.post({"prompt": SHORT})
        assert (status, len(late.calls)) == (200, 1)
        site.drop("late")
        await until(lambda: site.state("late") is None)


async def test_an_engine_that_leaves_ends_its_legs_and_gets_no_new_one(world: World) -> None:
    site, gateway = Site(world), world.gateway
    world.spare.healthy = True
    await until(lambda: site.state("spare") is State.READY)
    world.decode.script = hang
    site.not_ready("spare")
    request = asyncio.create_task(world.post({"prompt": SHORT}))
    await world.decode.hanging.wait()
    site.put(site.entries["spare"].member)
    site.drop("decode")
    gateway.members.drain()
    assert site.state("decode") is State.DRAINING
    num_calls = len(world.decode.calls)
    for _ in range(4):
        status, _ = await world.post({"prompt": SHORT})
        assert status == 200
    assert len(world.decode.calls) == num_calls
    assert "decode" in gateway.engines.by_name
    assert not request.done()
    request.cancel()
    await until(lambda: site.state("decode") is None)
    assert "decode" not in gateway.engines.by_name
    async with world.http.get(f"{world.url}/metrics") as response:
        assert 'engine="decode"' not in await response.text()


async def test_another_address_is_a_leave_and_a_join(world: World) -> None:
    site, moved = Site(world), ScriptedEngine("decode")
    async with started(moved):
        site.engine(moved)
        await until(lambda: engine_of(world, "decode").url == moved.url)
        await until(lambda: engine_of(world, "decode").is_ready)
        status, _ = await world.post({"prompt": SHORT})
        assert (status, len(moved.calls)) == (200, 1)
        site.put(Member("decode", MemberKind.ENGINE, "pd", world.decode.url, "pd-pool", "both"))
        await until(lambda: engine_of(world, "decode").url == world.decode.url)


async def test_an_engine_that_the_operator_drained_stays_so_when_it_returns(world: World) -> None:
    site, moved = Site(world), ScriptedEngine("decode")
    world.spare.healthy = True
    await until(lambda: site.state("spare") is State.READY)
    path = "/control/engines/decode"
    assert (await world.post({"drained": True}, path))[0] == 200
    async with started(moved):
        site.engine(moved)
        await until(lambda: engine_of(world, "decode").url == moved.url)
        await until(lambda: engine_of(world, "decode").is_ready)
        assert world.gateway.driver.is_drained("decode")
        assert (await world.post({"prompt": SHORT}))[0] == 200
        assert not moved.calls
        assert (await world.post({"drained": False}, path))[0] == 200
        assert world.gateway.driver.states.takes("decode")


async def test_a_prefill_site_grows_and_shrinks(world: World, identities: Path) -> None:
    """A second pool node with an engine: work crosses its link, then it leaves."""
    site, gateway = Site(world), world.gateway
    far = ScriptedEngine("prefill-2")
    make_identity(identities, "late-pool")
    pool = ScriptedPool("late-pool", identities, {"prefill-2": LAYOUT}, {"pd-pool": True})
    async with started(far, pool):
        site.put(Member("late-pool", MemberKind.POOL, "prfaas", f"127.0.0.1:{pool.port}"))
        site.engine(far, "prfaas", "late-pool")
        site.not_ready("prefill")
        await until(lambda: gateway.pools.link_up("late-pool", "pd-pool"))
        await until(lambda: site.state("prefill-2") is State.READY)
        await world.post({"prompt": LONG})
        assert (len(far.calls), len(world.prefill.calls)) == (1, 0)
        ends = [(link.source, link.destination) for link in gateway.driver.dispatcher.links]
        assert ("late-pool", "pd-pool") in ends
        assert ("late-pool", "pd-pool") in gateway.guards.breakers
        site.drop("prefill-2", "late-pool")
        await until(lambda: site.state("late-pool") is None)
    assert "late-pool" not in gateway.pools.names()
    links = gateway.driver.dispatcher.links
    assert all("late-pool" not in (link.source, link.destination) for link in links)
    assert ("late-pool", "pd-pool") not in gateway.guards.breakers
    status, _ = await world.post({"prompt": SHORT})
    assert status == 200


async def test_an_engine_of_another_model_is_refused_with_the_reason(world: World) -> None:
    site, odd = Site(world), ScriptedEngine("odd", model="other")
    async with started(odd):
        site.engine(odd)
        await until(lambda: site.state("odd") is State.REFUSED)
        found = await run("status", url=world.url)
        assert "member     odd  engine  REFUSED" in found.output
        assert "it does not serve 'tiny'" in found.output
        assert await world.metric('prfaas_members_refused{reason="other_model"}') == 1
        assert ("member_refused", "odd") in await alarms(world)
        status, _ = await world.post({"prompt": SHORT})
        assert (status, odd.calls) == (200, [])
        # It cures itself.
        odd.model = "tiny"
        await until(lambda: site.state("odd") is State.READY)
        site.drop("odd")
        await until(lambda: site.state("odd") is None)


async def test_a_contradicting_entry_harms_nobody(world: World) -> None:
    site = Site(world)
    site.put(Member("thief", MemberKind.ENGINE, "pd", world.decode.url, "pd-pool", "both"))
    found = await run("status", url=world.url)
    assert f"{world.decode.url} is the address of decode" in found.output
    status, _ = await world.post({"prompt": SHORT})
    assert status == 200
    assert site.state("decode") is State.READY


async def alarms(world: World) -> set[tuple[str, str]]:
    async with world.http.get(f"{world.url}/console/api/state") as response:
        return {(each["name"], each["subject"]) for each in (await response.json())["alarms"]}


def engine_of(world: World, name: str) -> Engine:
    return world.gateway.engines.by_name.get(name) or Engine("", "", None, "")  # type: ignore[arg-type]


FILE = """
[model]
name = "tiny"
path = "{path}"
[routing]
offload_threshold = {threshold}
[security]
identities = "{path}"
[clusters.prfaas]
role = "prfaas"
[clusters.prfaas.pools.prfaas-pool]
address = "127.0.0.1:{pool_ports[0]}"
[clusters.prfaas.engines.prefill]
pool = "prfaas-pool"
url = "{prefill}"
[clusters.pd]
role = "pd"
[clusters.pd.pools.pd-pool]
address = "127.0.0.1:{pool_ports[1]}"
[clusters.pd.engines]
{local}
"""


FAR = """
[clusters.far]
role = "prfaas"
[clusters.far.pools.far-pool]
address = "127.0.0.1:1"
[clusters.far.engines.far-engine]
pool = "far-pool"
url = "http://127.0.0.1:1"
"""


@asynccontextmanager
async def grown(
    checkpoint: Path, identities: Path, state: Path, **cluster: object
) -> AsyncIterator[Gateway]:
    """A gateway that is started without any member."""
    deployment = Deployment.model_validate(
        {
            "model": {"name": "tiny", "path": str(checkpoint)},
            "gateway": {"listen": "127.0.0.1:0"},
            "routing": {"offload_threshold": 10_000},
            "security": {"identities": str(identities)},
            "membership": {"folder": str(state)},
            "state": str(state),
            "clusters": {"pd": {"role": "pd", **cluster}},
        }
    )
    gateway = make_gateway(deployment, Endpoints({}, {}), poll_s=0.02, timing=TIMING)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


async def test_engines_with_roles_join_a_site_that_has_none(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    engines = ScriptedEngine("one"), ScriptedEngine("two")
    pool = ScriptedPool("pd-pool", identities, {each.name: LAYOUT for each in engines})
    async with (
        started(*engines, pool),
        grown(checkpoint, identities, tmp_path / "state", has_roles=True) as gateway,
    ):
        place = f"127.0.0.1:{pool.port}"
        members = [Member("pd-pool", MemberKind.POOL, "pd", place)] + [
            Member(engine.name, MemberKind.ENGINE, "pd", engine.url, "pd-pool", role)
            for engine, role in zip(engines, ("prefill", "decode"), strict=True)
        ]
        gateway.members.listed("test", [Listed(each) for each in members])
        state_of = gateway.members.machine.state_of
        await until(lambda: all(state_of(each.name) is State.READY for each in engines))
        split = gateway.driver.split
        assert split is not None
        await until(lambda: {n for n, ready in split.ready() if ready} == {"one", "two:decode"})
        both = Member("late", MemberKind.ENGINE, "pd", "http://127.0.0.1:1", "pd-pool", "both")
        gateway.members.listed("test", [Listed(each) for each in [*members, both]])
        assert gateway.members.refusals()["late"].reason is RefusalCause.UNKNOWN_ROLE
        gateway.members.listed("test", [])
        await until(lambda: not gateway.members.machine.members())


class File:
    """A deployment file for the members of a world."""

    def __init__(self, world: World, path: Path) -> None:
        self._world, self.path = world, path

    def write(self, *engines: ScriptedEngine, threshold: int = 100, more: str = "") -> None:
        local = [f'{each.name} = {{pool = "pd-pool", url = "{each.url}"}}' for each in engines]
        text = FILE.format(
            path=self.path.parent,
            threshold=threshold,
            pool_ports=[self._world.prfaas_pool.port, self._world.pd_pool.port],
            prefill=self._world.prefill.url,
            local="\n".join([*local, more]),
        )
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)


@asynccontextmanager
async def following(world: World, path: Path) -> AsyncIterator[tuple[File, DeploymentFile]]:
    file = File(world, path)
    file.write(world.decode, world.spare)
    deployment = load_deployment(path)
    source = DeploymentFile(
        (path,),
        lambda: load_deployment(path),
        deployment,
        gateway_view(deployment, {}, {}),
        POLL_S,
    )
    members = world.gateway.members
    members.sources.append(source)
    task = asyncio.create_task(source.follow(partial(members.listed, "file")))
    try:
        await until(lambda: source.current_at_s > 0)
        yield file, source
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_change_of_the_file_is_applied_without_a_restart(
    world: World, tmp_path: Path
) -> None:
    site, late = Site(world), ScriptedEngine("late")
    async with started(late), following(world, tmp_path / "site.toml") as (file, source):
        file.write(world.decode, late)
        await until(lambda: site.state("late") is State.READY)
        await until(lambda: site.state("spare") is None)
        assert site.state("decode") is State.READY
        assert not source.fault
        file.write(world.decode, world.spare)
        await until(lambda: site.state("late") is None)


async def test_settings_that_wait_for_a_restart_are_named_and_members_followed(
    world: World, tmp_path: Path
) -> None:
    site, late = Site(world), ScriptedEngine("late")
    async with started(late), following(world, tmp_path / "site.toml") as (file, source):
        file.write(world.decode, late, threshold=7)
        await until(lambda: site.state("late") is State.READY)
        found = await run("status", url=world.url)
        assert "WAITS FOR A RESTART: routing" in found.output
        assert not source.fault
        assert await alarms(world) >= {("restart_due", "file")}
        assert ("membership_old", "file") not in await alarms(world)
        file.write(world.decode, late)
        await until(lambda: not source.waits)
        assert ("restart_due", "file") not in await alarms(world)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"more": 'late = {pool = "nowhere", url = "http://127.0.0.1:1"}'}, "pool 'nowhere'"),
        ({"more": 'late = {pool = "pd-pool"}'}, "engines.late has no `url`"),
        ({"more": 'late = {pool = "pd-pool", url = "SAME"}'}, "is the address of decode"),
        ({"more": "[nonsense"}, "no valid TOML"),
        ({"more": FAR}, "names of clusters, clusters.far.role cannot change while the gateway"),
    ],
)
async def test_a_wrong_change_is_refused_whole(
    world: World, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    """The engine that is missing from the wrong file stays, and operators see why."""
    site = Site(world)
    async with following(world, tmp_path / "site.toml") as (file, source):
        if isinstance(more := change.get("more"), str):
            change["more"] = more.replace("SAME", world.decode.url)
        file.write(world.decode, **change)  # type: ignore[arg-type]
        await until(lambda: bool(source.fault))
        assert words in source.fault
        assert site.state("spare") is not None
        assert site.state("late") is None
        found = await run("status", url=world.url)
        assert "FAULT: the change is refused, the old members stay" in found.output
        assert await world.metric('prfaas_membership_fault{source="file"}') == 1
        assert ("membership_old", "file") in await alarms(world)
        file.write(world.decode, world.spare)
        await until(lambda: not source.fault)
        assert await world.metric('prfaas_membership_fault{source="file"}') == 0
