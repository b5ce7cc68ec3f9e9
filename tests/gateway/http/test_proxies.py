"""The proxies of docs/proxies.md: nginx really runs, Envoy's rules are read."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from yarl import URL

from tests.gateway.conftest import World
from tests.gateway.scripted_engine import stream_then_hang

from .certificates import NAME, certificate_in, trusting

EXAMPLES = Path(__file__).parents[3] / "examples" / "proxies"
HIDDEN = [
    "/control/requests",
    "/control",
    "/console/",
    "/metrics",
    "/kv/lookup",
    "//control/status",
    "/v1/../control/status",
    "/%63ontrol/status",
    "/control%2fstatus/..",
]
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def nginx(world: World, directory: Path) -> AsyncIterator[str]:
    """The example, with other ports and another certificate, before a gateway."""
    files = certificate_in(directory / "tls")
    port = _free_port()
    text = (EXAMPLES / "nginx.conf").read_text()
    for old, new in {
        "127.0.0.1:8000": world.url.removeprefix("http://"),
        "listen 443": f"listen 127.0.0.1:{port}",
        "llm.example.net;": f"{NAME};",
        "/etc/ssl/llm.example.net/fullchain.pem": files["certificate"],
        "/etc/ssl/llm.example.net/privkey.pem": files["key"],
    }.items():
        assert old in text
        text = text.replace(old, new)
    paths = "".join(
        f"{kind}_temp_path {directory}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = directory / "nginx.conf"
    main.write_text(
        f"user root; daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr;"
        f"events {{}} http {{ access_log off; {paths} {text} }}"
    )
    assert NGINX is not None
    process = await asyncio.create_subprocess_exec(
        NGINX, "-p", str(directory), "-c", str(main), stderr=asyncio.subprocess.PIPE
    )
    try:
        await _listens(port, process)
        yield f"https://{NAME}:{port}"
    finally:
        process.terminate()
        await process.communicate()


async def _listens(port: int, process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return
    assert process.stderr is not None
    pytest.fail((await process.stderr.read()).decode())


@pytest.mark.skipif(NGINX is None, reason="no `nginx` on this machine")
async def test_nginx_streams_hides_operators_pages_and_takes_long_prompts(
    world: World, tmp_path: Path
) -> None:
    async with (
        nginx(world, tmp_path) as url,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trusting(tmp_path / "tls"))
        ) as http,
    ):
        for path in HIDDEN:
            raw = URL(url + path, encoded=True)
            async with http.get(raw, allow_redirects=False) as reply:
                assert reply.status in (400, 404), path
                assert b"prfaas_" not in await reply.read()
        async with http.get(f"{url}/health?full=1") as reply:
            assert "parts" not in await reply.text()
        world.decode.script = stream_then_hang(2)
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as reply:
            # The engine hangs after two: what comes now was not held back.
            assert b"Hello" in await reply.content.readuntil(b"\n\n")
        world.decode.script = None
        long = {"model": "tiny", "prompt": "x" * 2_000_000, "max_tokens": 1}
        data = io.BytesIO(json.dumps(long).encode())
        async with http.post(f"{url}/v1/completions", data=data) as reply:
            assert reply.status == 400  # the gateway's answer: longer than the model takes
            assert "error" in await reply.json()


def test_envoy_hides_what_nginx_hides() -> None:
    listener = yaml.safe_load((EXAMPLES / "envoy.yaml").read_text())["static_resources"]
    manager = listener["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    hidden = re.compile(routes[0]["match"]["safe_regex"]["regex"])
    assert routes[0]["direct_response"] == {"status": 404}
    own = re.search(r"location ~ \^/\(([a-z|]+)\)", (EXAMPLES / "nginx.conf").read_text())
    assert own is not None
    for name in own[1].split("|"):
        assert hidden.fullmatch(f"/{name}")
        assert hidden.fullmatch(f"/{name}/status")
    assert not hidden.fullmatch("/v1/models")
    assert manager["normalize_path"]
    assert routes[-1]["route"]["timeout"] == "0s"
