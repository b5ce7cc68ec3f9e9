"""Identities and their authority are changed while pool nodes run."""

import asyncio
import logging
import shutil
import ssl
from pathlib import Path

import pytest

from prfaas.core.transfer.tickets import TicketRefusal, TicketRefusedError
from prfaas.errors import ConfigError
from prfaas.wire.identity import identity_in, make_authority, make_identity
from prfaas.wire.renewal import Renewal

from .conftest import World, is_settled
from .sites import NAMED, PROMPT, Site, content, seal, until

NAMES = ("gateway", "prfaas-pool", "pd-pool")


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    """Of this test alone: it changes them."""
    return made_in(tmp_path / "identities")


def made_in(directory: Path) -> Path:
    make_authority(directory)
    for name in NAMES:
        make_identity(directory, name)
    return directory


def committed(pd: Site, number: int) -> bool:
    return pd.metric("transfers_total", direction="received", state="committed") == number


async def test_an_authority_is_changed_between_transfers(world: World) -> None:
    prfaas, pd, prefill, decode = await world.two_sites()
    directory, following = world.identities, made_in(world.identities.parent / "next")
    old, new = (directory / "ca.pem").read_bytes(), (following / "ca.pem").read_bytes()

    def renew() -> None:
        for site in (prfaas, pd):
            site.node.link_room.renew_identity()

    async def link_anew_and_ship(number: int) -> None:
        await until(lambda: is_settled(prfaas) and is_settled(pd))
        world.relay.cut()
        await until(lambda: not prfaas.node.links["pd-pool"].is_up)
        world.relay.is_plugged = True
        await world.linked(prfaas, pd)
        transfer = prefill.push()
        prefill.push_done(transfer, rest=PROMPT)
        await until(lambda: committed(pd, number))

    assert await prefill.store(PROMPT)
    signed_before = seal(directory, b"t" * 16)
    # Both authorities are trusted everywhere before the first certificate changes.
    (directory / "ca.pem").write_bytes(old + new)
    renew()
    await link_anew_and_ship(1)
    for name in NAMES:
        for end in ("pem", "key"):
            shutil.copy(following / f"{name}.{end}", directory)
    renew()
    await link_anew_and_ship(2)
    # The old one goes: what it signed counts no more, what the new one signed does.
    (directory / "ca.pem").write_bytes(new)
    renew()
    await link_anew_and_ship(3)
    assert await decode.load(PROMPT) == [True] * len(PROMPT)
    assert decode.row(0, 0) == content(PROMPT[0])
    with pytest.raises(TicketRefusedError) as refused:
        pd.node.link_room.tickets.to_receive(
            signed_before,
            NAMED,
            transfer_id=b"t" * 16,
            source="prfaas-pool",
            layouts=frozenset(),
            free_bytes=1 << 20,
        )
    assert refused.value.reason is TicketRefusal.UNKNOWN_SIGNER


async def test_files_that_do_not_fit_change_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    shutil.copy(world.identities / "gateway.key", world.identities / "pd-pool.key")
    with pytest.raises(ConfigError, match="cannot be used"):
        pd.node.link_room.renew_identity()
    node = pd.node
    settings, gauge = node.settings, node.metrics.identity_ends
    Renewal(settings.identity, settings.name, node.link_room.renew_identity, gauge).hang_up()
    assert "identity_kept" in caplog.text
    world.relay.cut()
    world.relay.is_plugged = True
    await world.linked(prfaas, pd)
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: committed(pd, 1))


def mounted(directory: Path, name: str, source: Path, version: str) -> None:
    """Put an identity into a directory as the kubelet does with a Secret: behind `..data`."""
    (directory / version).mkdir()
    for end in ("pem", "key"):
        shutil.copy(source / f"{name}.{end}", directory / version)
    link = directory / "..data_tmp"
    link.symlink_to(version)
    link.replace(directory / "..data")


async def test_files_behind_a_link_that_is_swapped_are_taken_up_without_a_signal(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, pd, prefill, decode = await world.two_sites()
    directory = world.identities
    identity = identity_in(directory, "pd-pool")
    following = tmp_path / "following"
    shutil.copytree(directory, following)
    for end in ("pem", "key"):
        (following / f"pd-pool.{end}").unlink()
    make_identity(following, "pd-pool")
    mounted(directory, "pd-pool", directory, "..1")
    for path in (identity.certificate, identity.key):
        path.unlink()
        path.symlink_to(Path("..data") / path.name)
    node, before = pd.node, identity.certificate.read_text()
    gauge = node.metrics.identity_ends
    renewal = Renewal(identity, "pd-pool", node.link_room.renew_identity, gauge, poll_s=0.01)
    renewal.watch()
    transfer = prefill.push()
    assert await prefill.store(PROMPT[:4], transfer)
    mounted(directory, "pd-pool", following, "..2")
    caplog.set_level(logging.INFO)
    await until(lambda: "identity_renewed" in caplog.text)
    assert await prefill.store(PROMPT[4:], transfer)
    prefill.push_done(transfer)
    await until(lambda: committed(pd, 1))
    assert await decode.load(PROMPT) == [True] * len(PROMPT)
    place = ("127.0.0.1", node.link_port.port)
    shown = await asyncio.to_thread(ssl.get_server_certificate, place)
    assert identity.certificate.read_text() != before
    assert shown.strip() == identity.certificate.read_text().strip()
