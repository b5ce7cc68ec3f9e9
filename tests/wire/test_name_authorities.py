"""Names are bound to authorities: that of a partner proves its own names and no others."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from prfaas.core.transfer.tickets import TicketRefusedError
from prfaas.errors import ConfigError, PeerError
from prfaas.wire.allow_list import AllowList
from prfaas.wire.identity import Identity, identity_in, make_authority, make_identity, peer_name
from prfaas.wire.name_authorities import NameAuthorities
from prfaas.wire.tickets import TicketOpener
from tests.pool.sites import seal

NAMES = ("gateway", "pd-pool", "prfaas-pool", "prfaas-pool-2")


@pytest.fixture
def sites(tmp_path: Path) -> tuple[Path, Path]:
    """A PD site that lets its partner prove names that begin with prfaas-, and the partner.

    The partner has made certificates of all names.
    """
    local, partner = tmp_path / "home", tmp_path / "partner"
    for directory in (local, partner):
        make_authority(directory)
        for name in NAMES:
            make_identity(directory, name)
    shutil.copy(partner / "ca.pem", local / "prfaas-*.ca.pem")
    return local, partner


def as_client(local: Path, of: Path, name: str) -> Identity:
    """An identity of one directory that trusts the authority of another."""
    return Identity(local / "ca.pem", of / f"{name}.pem", of / f"{name}.key")


async def met(local: Path, of: Path, name: str) -> str:
    """The name that a process of the PD site admits somebody by, in both directions."""
    found: list[str] = []
    done = asyncio.Event()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            allowed = AllowList(NAMES)
            found.append(peer_name(writer.get_extra_info("ssl_object"), allowed))
        except PeerError as error:
            found.append(str(error))
        writer.close()
        done.set()

    tls = identity_in(local, "pd-pool").server_context()
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    async with server:
        context = as_client(local, of, name).client_context()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        await reader.read()
        await done.wait()
        writer.transport.abort()
    return found[0]


@pytest.mark.parametrize("name", ["gateway", "pd-pool"])
async def test_a_partner_cannot_pose_as_a_part_of_this_site(
    sites: tuple[Path, Path], name: str
) -> None:
    local, partner = sites

    assert await met(local, local, name) == name
    assert "cannot prove this name" in await met(local, partner, name)


@pytest.mark.parametrize("name", ["prfaas-pool", "prfaas-pool-2"])
async def test_a_name_of_the_partner_is_proven_by_its_authority_alone(
    sites: tuple[Path, Path], name: str
) -> None:
    local, partner = sites

    assert await met(local, partner, name) == name
    assert "is not signed by an authority of prfaas-*.ca.pem" in await met(local, local, name)


async def test_a_partner_that_is_also_in_ca_pem_proves_no_more(sites: tuple[Path, Path]) -> None:
    """As sites were set up that had one trust store."""
    local, partner = sites
    with (local / "ca.pem").open("ab") as file:
        file.write((partner / "ca.pem").read_bytes())

    assert "cannot prove this name" in await met(local, partner, "gateway")
    assert await met(local, partner, "prfaas-pool") == "prfaas-pool"
    assert await met(local, local, "gateway") == "gateway"


async def test_two_partners_cannot_pose_as_each_other(
    sites: tuple[Path, Path], tmp_path: Path
) -> None:
    local, partner = sites
    other = tmp_path / "other"
    make_authority(other)
    for name in ("prfaas-pool", "third-pool"):
        make_identity(other, name)
    shutil.copy(other / "ca.pem", local / "third-pool.ca.pem")

    assert "is not signed by" in await met(local, other, "prfaas-pool")
    assert await met(local, partner, "prfaas-pool") == "prfaas-pool"


async def test_a_new_authority_of_this_site_beside_the_old_one_is_trusted(
    sites: tuple[Path, Path], tmp_path: Path
) -> None:
    local, new = sites[0], tmp_path / "new"
    make_authority(new)
    make_identity(new, "gateway")
    with (local / "ca.pem").open("ab") as file:
        file.write((new / "ca.pem").read_bytes())

    assert await met(local, new, "gateway") == "gateway"


def test_a_ticket_of_a_partner_that_poses_as_the_gateway_is_refused(
    sites: tuple[Path, Path],
) -> None:
    local, partner = sites
    opener = TicketOpener(local / "ca.pem", AllowList(["gateway"]))
    transfer, now_ns = bytes(16), time.time_ns()

    assert opener.open(seal(local, transfer), now_ns).signer == "gateway"
    with pytest.raises(TicketRefusedError, match="cannot prove this name"):
        opener.open(seal(partner, transfer), now_ns)


async def test_an_engine_of_this_site_is_not_one_of_the_partner(
    sites: tuple[Path, Path],
) -> None:
    """Engines are dialled by host name, which any authority could sign."""
    local, partner = sites
    make_identity(partner, "engine", ["127.0.0.1"])
    app = web.Application()

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    tls = as_client(local, partner, "engine").server_context()
    server, loop = runner.server, asyncio.get_running_loop()
    assert server is not None
    listener = await loop.create_server(server, "127.0.0.1", 0, ssl=tls)
    url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/health"
    context = identity_in(local, "gateway").host_context()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="cannot prove"):
            await http.get(url, ssl=context)
        shutil.copy(partner / "ca.pem", local / "127.0.0.1.ca.pem")
        identity_in(local, "gateway").refresh(context)
        async with http.get(url, ssl=context) as reply:
            assert reply.status == 200
    listener.close()
    await runner.cleanup()


def test_a_file_that_is_no_authority_is_refused(sites: tuple[Path, Path]) -> None:
    local, _ = sites
    (local / "bad.ca.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"
    )

    with pytest.raises(ConfigError, match=r"bad\.ca\.pem is no PEM file"):
        identity_in(local, "gateway").client_context()


def test_without_entries_all_names_count(sites: tuple[Path, Path]) -> None:
    _, partner = sites
    NameAuthorities.beside(partner / "ca.pem").prove("gateway", b"")
    assert isinstance(identity_in(partner, "gateway").client_context(), ssl.SSLContext)
