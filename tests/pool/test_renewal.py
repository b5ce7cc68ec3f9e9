"""Identities and their authority are changed while pool nodes run."""

import shutil
from pathlib import Path

import pytest

from prfaas.core.transfer.tickets import Refusal, TicketRefusedError
from prfaas.errors import ConfigError
from prfaas.wire.identity import make_authority, make_identity
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
            site.node.renew_identity()

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
        pd.node._tickets.to_receive(
            signed_before,
            NAMED,
            transfer_id=b"t" * 16,
            source="prfaas-pool",
            layouts=frozenset(),
            free_bytes=1 << 20,
        )
    assert refused.value.reason is Refusal.UNKNOWN_SIGNER


async def test_files_that_do_not_fit_change_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    prfaas, pd, prefill, _ = await world.two_sites()
    shutil.copy(world.identities / "gateway.key", world.identities / "pd-pool.key")
    with pytest.raises(ConfigError, match="can not be used"):
        pd.node.renew_identity()
    node = pd.node
    settings, gauge = node.settings, node.metrics.identity_ends
    Renewal(settings.identity, settings.name, node.renew_identity, gauge).hang_up()
    assert "identity_kept" in caplog.text
    world.relay.cut()
    world.relay.is_plugged = True
    await world.linked(prfaas, pd)
    transfer = prefill.push()
    assert await prefill.store(PROMPT, transfer)
    prefill.push_done(transfer)
    await until(lambda: committed(pd, 1))
