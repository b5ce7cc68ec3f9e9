"""HTTPS for clients: the certificate is checked by a real client, and taken up anew."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import aiohttp
import pytest
from cryptography.hazmat.primitives import serialization

from prfaas.config.deployment import ClientTlsTable
from prfaas.config.tenants import open_doors
from prfaas.errors import ConfigError
from prfaas.gateway.http.connections import ClientTls
from tests.gateway.conftest import World, running, until
from tests.gateway.scripted_engine import hang

from .certificates import NAME, certificate_in, trusting


def place(world: World) -> str:
    return f"https://{NAME}:{world.url.rsplit(':', 1)[1]}"


def table(files: dict[str, str]) -> ClientTlsTable:
    return ClientTlsTable(certificate=Path(files["certificate"]), key=Path(files["key"]))


async def test_clients_speak_https_and_nothing_else(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    files = certificate_in(tmp_path / "tls")
    async with running(checkpoint, identities, tmp_path, gateway={"tls": files}) as world:
        assert world.url.startswith("https://")
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3, "stream": True}
        trusted = trusting(tmp_path / "tls")
        async with world.http.post(f"{place(world)}/v1/completions", json=body, ssl=trusted) as got:
            assert got.status == 200
            assert (await got.read()).endswith(b"data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await world.http.get(f"{place(world)}/health")
        with pytest.raises(aiohttp.ClientError):
            await world.http.get(place(world).replace("https", "http") + "/health")


async def test_a_certificate_that_is_swapped_is_shown_without_a_signal(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    old, new = certificate_in(tmp_path / "old"), certificate_in(tmp_path / "new")
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "old")
    files = {key: path.replace(str(tmp_path / "old"), str(link)) for key, path in old.items()}
    async with running(checkpoint, identities, tmp_path, gateway={"tls": files}) as world:
        tls = world.gateway._client_tls
        assert tls is not None
        url = f"{place(world)}/version"
        async with world.http.get(url, ssl=trusting(tmp_path / "old")) as kept:
            assert kept.status == 200
            assert not tls.look()
            staged = tmp_path / "staged"
            staged.symlink_to(tmp_path / "new")
            staged.replace(link)
            assert tls.look()
        async with aiohttp.ClientSession() as other:
            async with other.get(url, ssl=trusting(tmp_path / "new")) as reply:
                assert reply.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await other.get(url, ssl=trusting(tmp_path / "old"))
    assert new["key"].endswith("localhost.key")


def test_files_that_do_not_fit_leave_the_certificate_of_before(tmp_path: Path) -> None:
    files, other = certificate_in(tmp_path / "tls"), certificate_in(tmp_path / "other")
    tls = ClientTls(table(files))
    Path(files["key"]).write_bytes(Path(other["key"]).read_bytes())
    assert not tls.look()
    with pytest.raises(ConfigError, match=r"gateway\.tls: certificate .* cannot be used"):
        tls.renew()
    shown = _shown(tls.context, trusting(tmp_path / "tls"))
    assert shown == ssl.PEM_cert_to_DER_cert(Path(files["certificate"]).read_text())


def _shown(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes | None:
    """The certificate that a handshake in memory ends with."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=NAME)
    for _ in range(4):
        for end in (theirs, ours):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return theirs.getpeercert(binary_form=True)


async def test_handshakes_count_until_they_fail_and_keep_nobody_out(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    files = certificate_in(tmp_path / "tls")
    async with running(checkpoint, identities, tmp_path, gateway={"tls": files}) as world:
        connections = world.gateway.connections
        assert connections.handshakes is not None
        connections.handshakes.limit_s, connections.limit = 3600.0, 16
        port = int(world.url.rsplit(":", 1)[1])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        await until(lambda: connections.num_open == 4)
        # One more ends the oldest, and is served beside the others.
        url, trusted = f"{place(world)}/version", trusting(tmp_path / "tls")
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusted) as reply:
            assert reply.status == 200
        assert await silent[0][0].read() == b""
        assert await closed(world, tmp_path) == 1
        # Those that leave, and those that speak no TLS, have given their places back.
        silent[1][1].close()
        for _, writer in silent[2:]:
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        handshakes = connections.handshakes
        await until(lambda: len(handshakes) == 0)
        for _, writer in silent:
            writer.close()


async def test_a_full_gateway_tells_a_client_so_over_tls(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    files = certificate_in(tmp_path / "tls")
    async with running(checkpoint, identities, tmp_path, gateway={"tls": files}) as world:
        world.decode.script = hang
        world.gateway.connections.limit = 2
        trusted = trusting(tmp_path / "tls")
        asking = asyncio.create_task(
            world.http.post(f"{place(world)}/v1/completions", json={"prompt": "a"}, ssl=trusted)
        )
        await until(lambda: len(world.decode.calls) == 1)
        async with world.http.get(f"{place(world)}/version", ssl=trusted) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def closed(world: World, directory: Path) -> float:
    url = f"{place(world)}/metrics"
    async with world.http.get(url, ssl=trusting(directory / "tls")) as reply:
        text = await reply.text()
    pattern = r'^prfaas_client_connections_closed_total\{reason="full"\} (.*)$'
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(
    ("listen", "tls", "warned"),
    [("0.0.0.0:80", False, True), ("0.0.0.0:443", True, False), ("127.0.0.1:80", False, False)],
)
def test_keys_that_cross_a_network_in_clear_are_warned_of(
    listen: str, tls: bool, warned: bool
) -> None:
    found: Iterator[str] = open_doors(listen, tenants=True, operator_keys=True, tls=tls)
    assert any("in clear" in line for line in found) == warned


def test_a_key_with_a_password_is_refused_and_not_asked_for_at_the_terminal(tmp_path: Path) -> None:
    """In a process with a terminal of its own, where OpenSSL would wait for the answer."""
    files = certificate_in(tmp_path / "tls")
    plain = serialization.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    locked = plain.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    Path(files["key"]).write_bytes(locked)
    program = dedent("""
        import os, sys
        from pathlib import Path
        from prfaas.config.deployment import ClientTlsTable
        from prfaas.errors import ConfigError
        from prfaas.gateway.http.connections import server_context
        os.login_tty(os.openpty()[1])
        try:
            server_context(ClientTlsTable(certificate=Path(sys.argv[1]), key=Path(sys.argv[2])))
        except ConfigError as error:
            sys.exit(3 if "without a password" in str(error) else 4)
    """)
    command = [sys.executable, "-c", program, files["certificate"], files["key"]]
    assert subprocess.run(command, timeout=40, check=False).returncode == 3
