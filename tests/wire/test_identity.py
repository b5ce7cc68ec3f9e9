"""Admission by identity: real handshakes, accepted and refused."""

import asyncio
import ssl
import stat
from pathlib import Path

import pytest

from prfaas.errors import ConfigError, PeerError
from prfaas.wire.channel import Channel
from prfaas.wire.identity import (
    Identity,
    identity_in,
    make_authority,
    make_identity,
    peer_name,
)
from prfaas.wire.messages.base import Goodbye, Ping
from prfaas.wire.messages.codec import decode, encode

from .conftest import Server, until


async def dial(server: Server, context: ssl.SSLContext | None) -> bytes:
    """Connect, say something, and listen until the server hangs up."""
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        writer.write(encode(Ping()))
        return await reader.read()
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        if writer is not None:
            writer.transport.abort()


def anonymous(identities: Path) -> ssl.SSLContext:
    """A client that trusts the authority and has no certificate of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(identities / "ca.pem")
    return context


async def test_two_identities_of_one_authority_know_each_other(
    server: Server, identities: Path
) -> None:
    closed = asyncio.Event()
    names: list[str] = []

    def greet(channel: Channel) -> None:
        names.append(peer_name(channel.ssl_object, frozenset({"server"})))

    loop = asyncio.get_running_loop()
    _, channel = await loop.create_connection(
        lambda: Channel(lambda *_: None, lambda *_: closed.set(), greet),
        "127.0.0.1",
        server.port,
        ssl=identity_in(identities, "alice").client_context(),
    )
    assert names == ["server"]
    assert channel.ssl_object is not None
    assert channel.ssl_object.version() == "TLSv1.3"
    channel.send(Ping())
    await until(lambda: len(server.frames) == 1)
    assert server.opened == ["alice"]
    frame = server.frames[0]
    assert decode(frame.payload) == Ping()
    channel.close("done")
    await closed.wait()


async def test_a_name_that_is_not_on_the_list_is_refused_before_a_frame_is_read(
    server: Server, identities: Path
) -> None:
    told = await dial(server, identity_in(identities, "mallory").client_context())
    # What it is told may be lost with the connection.
    assert told in (b"", encode(Goodbye(reason="you are not on the list here")))
    await until(lambda: bool(server.closed))
    assert "mallory" in server.closed[0]
    assert "alice" in server.closed[0]
    assert server.opened == []
    assert server.frames == []


@pytest.mark.parametrize("kind", ["foreign", "anonymous", "tls 1.2", "plain"])
async def test_a_stranger_never_reaches_the_framing(
    server: Server, identities: Path, foreign: Path, kind: str
) -> None:
    stranger = Identity(identities / "ca.pem", foreign / "alice.pem", foreign / "alice.key")
    context = None
    if kind == "foreign":
        context = stranger.client_context()
    elif kind == "anonymous":
        context = anonymous(identities)
    elif kind == "tls 1.2":
        context = anonymous(identities)
        context.load_cert_chain(identities / "alice.pem", identities / "alice.key")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await dial(server, context) == b""
    assert server.channels == []
    _, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=identity_in(identities, "alice").client_context()
    )
    await until(lambda: server.opened == ["alice"])
    assert server.frames == []
    writer.transport.abort()


async def test_a_client_refuses_a_server_of_a_foreign_authority(
    server: Server, foreign: Path
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=identity_in(foreign, "alice").client_context()
        )
    assert server.frames == []


def test_without_a_connection_there_is_no_name() -> None:
    with pytest.raises(PeerError, match="without a name"):
        peer_name(None, frozenset({"alice"}))


def test_keys_are_for_the_owner_only(identities: Path) -> None:
    for path in identities.iterdir():
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o600 if path.suffix == ".key" else 0o644), path.name


def test_making_again_changes_nothing(tmp_path: Path) -> None:
    make_authority(tmp_path)
    identity = make_identity(tmp_path, "pool")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_authority(tmp_path)
    assert make_identity(tmp_path, "pool") == identity
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_an_authority_no_identity_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no authority in"):
        make_identity(tmp_path, "pool")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", ["ca.pem", "ca.key"])
def test_an_authority_that_can_not_be_read_is_a_mistake(tmp_path: Path, broken: str) -> None:
    make_authority(tmp_path)
    (tmp_path / broken).write_text("not a certificate\n")
    with pytest.raises(ConfigError, match=broken):
        make_identity(tmp_path, "pool")


@pytest.mark.parametrize("missing", ["ca.pem", "pool.pem", "pool.key"])
def test_a_missing_file_names_the_identity_and_the_command(tmp_path: Path, missing: str) -> None:
    make_authority(tmp_path)
    identity = make_identity(tmp_path, "pool")
    (tmp_path / missing).unlink()
    for use in (identity.server_context, identity.client_context):
        with pytest.raises(ConfigError, match=r"pool\.pem .*prfaas identity"):
            use()


def test_a_key_of_somebody_else_is_a_mistake(tmp_path: Path) -> None:
    make_authority(tmp_path)
    one, other = make_identity(tmp_path, "one"), make_identity(tmp_path, "other")
    with pytest.raises(ConfigError, match=r"one\.pem"):
        Identity(one.authority, one.certificate, other.key).server_context()
