"""Pools refuse what a tenant's regions exclude, whatever a gateway decided or signed."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from prfaas.audit.reading import logs_of, records
from prfaas.audit.settings import AuditSettings
from prfaas.errors import ConfigError
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.pool.store.disk_segments import SegmentFiles
from prfaas.pool.store.region_stamp import STAMP
from prfaas.wire.certificates import reissue
from prfaas.wire.fragments import ReceivedBlock, block_digest
from prfaas.wire.identity import make_authority, make_identity
from prfaas.wire.messages.fields import wire_keys
from prfaas.wire.messages.gateway import TransferEnded
from prfaas.wire.messages.link import Accepted, Pull, Refused
from tests.pool.conftest import World
from tests.pool.segment_files import append, name_of
from tests.pool.sites import (
    LAYOUT,
    NAMED,
    PROMPT,
    Site,
    content,
    offer,
    seal,
    source,
    subscribe,
    until,
)

EU, US, BOTH, NONE = (frozenset(r) for r in ({"eu"}, {"us"}, {"eu", "us"}, ()))
SENT, RECEIVED = {"direction": "sent"}, {"direction": "received"}

CASES: dict[str, tuple[dict[str, frozenset[str]], str]] = {
    "a ticket without region": ({"ticket": NONE}, "no_region"),
    "a ticket for other regions": ({"ticket": US}, "region"),
    "a source outside": ({"prfaas-pool": US}, "region"),
    "a destination outside": ({"pd-pool": US}, "region"),
    "a disk of the destination outside": ({"pd-pool": BOTH}, "region"),
    "a gateway that signs for more than its certificate": (
        {"ticket": BOTH, "pd-pool": US},
        "region",
    ),
    "a gateway whose certificate has no region": ({"gateway": NONE}, "no_region"),
    "a peer whose certificate has no region": ({"pd-pool": NONE}, "no_region"),
}
"""Regions that differ from "eu" for all."""


def regions_of(case: str) -> tuple[dict[str, frozenset[str]], str]:
    changes, reason = CASES[case]
    everyone = dict.fromkeys(("ticket", "gateway", "prfaas-pool", "pd-pool"), EU)
    return everyone | changes, reason


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    """An authority; each test issues the certificates that it needs."""
    local = tmp_path / "regions"
    make_authority(local)
    return local


def issue(identities: Path, regions: dict[str, frozenset[str]]) -> None:
    for name in ("gateway", "prfaas-pool", "pd-pool"):
        make_identity(identities, name, regions=regions.get(name, EU))


async def two_sites(world: World, regions: dict[str, frozenset[str]]) -> tuple[Site, Site]:
    issue(world.identities, regions)
    audit = AuditSettings(world.sockets / "audit", world.sockets / "audit")
    settings: dict[str, Any] = {"audit": audit}
    pd = await world.start_pd(regions=regions.get("pd-pool", EU), **settings)
    settings["needs_grant"] = True
    prfaas = await world.start("prfaas-pool", regions=regions.get("prfaas-pool", EU), **settings)
    await world.linked(prfaas, pd)
    return prfaas, pd


def audited(world: World, pool: str, kind: str) -> list[dict[str, Any]]:
    lines = records(logs_of(world.sockets / "audit")[pool])
    return [line.fields for line in lines if line.kind == kind]


async def test_blocks_move_inside_the_regions_of_a_ticket(world: World) -> None:
    prfaas, pd = await two_sites(world, {"gateway": BOTH})
    prefill = await world.engine("prfaas-pool")
    transfer = prefill.push(regions=EU)
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == 1)
    assert pd.held() == prfaas.held() == set(PROMPT)
    for site in (prfaas, pd):
        await site.kill()
    for kind in ("granted", "movement"):
        assert [line["region"] for line in audited(world, "pd-pool", kind)] == ["eu"]


@pytest.mark.parametrize("case", CASES)
async def test_a_source_sends_nothing_outside_the_regions(world: World, case: str) -> None:
    regions, reason = regions_of(case)
    prfaas, pd = await two_sites(world, regions)
    gateway = await subscribe(prfaas, world.identities)
    prefill = await world.engine("prfaas-pool")
    transfer = prefill.push(regions=regions["ticket"])
    # Nothing of the prompt stays where the ticket does not let it be.
    assert not await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: bool(gateway.of(TransferEnded)))
    [ended] = gateway.of(TransferEnded)
    assert isinstance(ended, TransferEnded)
    assert (ended.state, ended.reason) == ("refused", reason)
    assert prfaas.metric("tickets_refused_total", end="source", reason=reason) == 1
    assert prfaas.metric("link_bytes_total", peer="pd-pool", direction="sent") == 0
    assert prfaas.held() == pd.held() == set()
    gateway.channel.close("done")
    await prfaas.kill()
    [line] = audited(world, "prfaas-pool", "refusal")
    assert (line["end"], line["reason"], line["transfer"]) == ("source", reason, transfer.hex())


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("a peer")])
async def test_a_destination_refuses_what_a_source_offers_all_the_same(
    world: World, case: str
) -> None:
    regions, reason = regions_of(case)
    issue(world.identities, regions)
    pd = await world.start_pd(regions=regions["pd-pool"])
    peer = await source(pd, world.identities)
    transfer = secrets.token_bytes(16)
    peer.channel.send(offer(world.identities, transfer, regions=regions["ticket"]))
    await until(lambda: bool(peer.of(Refused)) or bool(peer.of(Accepted)))
    [refused] = peer.of(Refused)
    assert isinstance(refused, Refused)
    assert refused.reason == reason
    layout_id, key = LAYOUT.layout_id, PROMPT[0]
    data = content(key)
    digest = block_digest(layout_id, key, data)
    peer.bring(ReceivedBlock(transfer, layout_id, key, digest, bytearray(data)))
    again = secrets.token_bytes(16)
    peer.channel.send(offer(world.identities, again, regions=regions["ticket"]))
    await until(lambda: len(peer.of(Refused)) == 2)
    assert pd.held() == set()
    assert pd.metric("tickets_refused_total", end="destination", reason=reason) == 2
    peer.channel.close("done")


async def test_a_destination_refuses_a_source_whose_certificate_has_no_region(world: World) -> None:
    issue(world.identities, {"prfaas-pool": NONE})
    pd = await world.start_pd(regions=EU)
    peer = await source(pd, world.identities)
    peer.channel.send(offer(world.identities, secrets.token_bytes(16), regions=EU))
    await until(lambda: bool(peer.of(Refused)))
    [refused] = peer.of(Refused)
    assert isinstance(refused, Refused)
    assert refused.reason == "no_region"
    peer.channel.close("done")


@pytest.mark.parametrize("case", CASES)
async def test_nothing_is_pulled_or_copied_outside_the_regions(world: World, case: str) -> None:
    # A pull for a local prefill and a copy of a hot prefix are the same message.
    regions, reason = regions_of(case)
    _, pd = await two_sites(world, regions)
    gateway = await subscribe(pd, world.identities)
    transfer = secrets.token_bytes(16)
    sealed = seal(world.identities, transfer, regions=regions["ticket"])
    gateway.channel.send(
        Pull(
            transfer_id=transfer,
            source="prfaas-pool",
            keys=wire_keys(PROMPT),
            ticket=sealed,
            blocks=NAMED,
        )
    )
    await until(lambda: bool(gateway.of(Refused)))
    [refused] = gateway.of(Refused)
    assert isinstance(refused, Refused)
    assert refused.reason == reason
    gateway.channel.close("done")


async def test_a_prfaas_pool_keeps_nothing_of_a_request_without_ticket(world: World) -> None:
    prfaas, pd = await two_sites(world, {})
    prefill, decode = await world.engine("prfaas-pool"), await world.engine("pd-pool")
    assert not await prefill.store(PROMPT)
    assert prfaas.held() == set()
    assert prfaas.metric("pool_blocks_dropped_total", reason="no_ticket") == len(PROMPT)
    assert await decode.store(PROMPT)
    assert pd.held() == set(PROMPT)


async def test_pools_without_regions_ignore_those_of_tickets(world: World) -> None:
    prfaas, pd = await two_sites(world, {"prfaas-pool": NONE, "pd-pool": NONE, "gateway": NONE})
    prefill = await world.engine("prfaas-pool")
    for number, regions in enumerate((NONE, US), 1):
        transfer = prefill.push(regions=regions)
        assert await prefill.store(PROMPT[number - 1 : number], transfer)
        prefill.push_done(transfer)
        await until(
            lambda: pd.metric("transfers_total", **RECEIVED, state="committed") == number  # noqa: B023
        )
    assert prfaas.held() == pd.held() == set(PROMPT[:2])


async def test_a_peer_that_comes_back_from_another_region_gets_nothing_more(world: World) -> None:
    prfaas, pd = await two_sites(world, {})
    prefill = await world.engine("prfaas-pool")
    transfer = prefill.push(regions=EU)
    await until(lambda: pd.node.inbound.known.is_open(transfer))
    await pd.kill()
    world.sites.remove(pd)
    reissue(world.identities, "pd-pool", US)
    moved = await world.start_pd(regions=US)
    await world.linked(prfaas, moved)
    await until(lambda: prfaas.node.link_room.num_open == 0)
    assert await prefill.store(PROMPT, transfer)
    later = prefill.push(regions=EU)
    prefill.push_done(later)
    await until(lambda: prfaas.metric("tickets_refused_total", end="source", reason="region") == 1)
    assert moved.held() == set()


def test_a_pool_node_does_not_start_with_a_certificate_of_other_regions(
    identities: Path, tmp_path: Path
) -> None:
    issue(identities, {"pd-pool": US})
    with pytest.raises(ConfigError, match="pd-pool --renew --region eu"):
        settings_of(identities, tmp_path, EU).check_certificate()
    reissue(identities, "pd-pool", EU)
    settings_of(identities, tmp_path, EU).check_certificate()
    with pytest.raises(ConfigError, match="names the regions eu, and"):
        settings_of(identities, tmp_path, BOTH).check_certificate()


def settings_of(identities: Path, folder: Path, regions: frozenset[str]) -> PoolProcessSettings:
    return PoolProcessSettings(
        name="pd-pool",
        memory_bytes=1 << 20,
        listen=("127.0.0.1", 0),
        socket_path=folder / "s",
        admin=("127.0.0.1", 0),
        identity=make_identity(identities, "pd-pool"),
        peers={},
        sources=frozenset(),
        gateways=frozenset(),
        regions=regions,
    )


async def test_a_disk_keeps_blocks_over_a_restart_in_the_same_regions_alone(
    world: World, tmp_path: Path
) -> None:
    issue(world.identities, {"pd-pool": EU})
    disk = tmp_path / "disk"

    async def restarted(regions: frozenset[str]) -> set[bytes]:
        """Names on disk after a start under these regions, and its end."""
        if regions:
            reissue(world.identities, "pd-pool", regions)
        site = await world.start_pd(disk=disk, disk_bytes=1 << 24, regions=regions)
        tier = site.node.disk
        assert tier is not None
        await until(lambda: tier.is_ready)
        names = {key.block_hash for _, key in tier.names()}
        await site.kill()
        world.sites.remove(site)
        return names

    assert await restarted(EU) == set()
    assert (disk / STAMP).read_text() == "eu\n"
    files = SegmentFiles(disk, EU)
    files.start()
    append(files, 1, 100)
    files.close()
    kept = {name_of(1)[1].block_hash}
    assert await restarted(EU) == kept
    assert await restarted(US) == set()
    assert not list(disk.glob("*.seg"))
    assert await restarted(EU) == set()


def test_blocks_of_a_time_without_regions_do_not_outlive_it(tmp_path: Path) -> None:
    for before, after, num_kept in ((NONE, NONE, 1), (NONE, EU, 0), (EU, NONE, 1), (EU, BOTH, 0)):
        folder = tmp_path / f"{len(before)}-{len(after)}"
        for regions in (before, after):
            files = SegmentFiles(folder, regions)
            if regions is before and not files.found():
                files.start()
                append(files, 1, 100)
            found = len(files.found())
            files.close()
        assert found == num_kept, (before, after)
        assert (folder / STAMP).exists() == bool(after)
