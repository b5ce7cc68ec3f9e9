"""Answers without an operator's key: no names, no software, no Python."""

import asyncio
import re
from pathlib import Path

import pytest

from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.admin_http import AdminServer, NodePhase

from .conftest import World, running
from .tenant_keys import HASHES, bearer, tenants

TALKATIVE = re.compile(rb"python|aiohttp|traceback|exception|\bb'", re.IGNORECASE)
WRONG = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 is a ClientHello\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"a": [}]',
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
]


async def answer(port: int, sent: bytes) -> bytes:
    """Return all bytes up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent.replace(b"\r\nHost: x", b"\r\nHost: localhost\r\nConnection: close", 1))
        return await asyncio.wait_for(reader.read(1 << 20), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("sent", WRONG, ids=range(len(WRONG)))
async def test_a_gateway_names_no_software(world: World, sent: bytes) -> None:
    head, _, body = (await answer(int(world.url.rpartition(":")[2]), sent)).partition(b"\r\n\r\n")
    assert b"\r\nserver: prfaas" in head.lower()
    assert not TALKATIVE.search(head)
    assert b"metrics" in sent or not TALKATIVE.search(body), body


@pytest.mark.parametrize("sent", WRONG, ids=range(len(WRONG)))
async def test_a_pool_nodes_admin_port_names_no_software(sent: bytes) -> None:
    server = AdminServer(PoolMetrics(), ("127.0.0.1", 0), lambda: NodePhase.READY)
    await server.open()
    try:
        head, _, body = (await answer(server.port, sent)).partition(b"\r\n\r\n")
    finally:
        await server.close()
    assert b"\r\nserver: prfaas" in head.lower()
    assert not TALKATIVE.search(head)
    assert b"metrics" in sent or not TALKATIVE.search(body), body


async def test_strangers_learn_how_much_is_missing_and_operators_what(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"operator_keys": [HASHES["operator"]]}
    async with running(
        checkpoint, identities, tmp_path / "state", tenants=tenants(), gateway=gateway
    ) as world:
        await world.prefill.stop()

        async def health(name: str | None) -> tuple[int, str]:
            headers = bearer(name) if name else {}
            url = f"{world.url}/health?full=1"
            async with world.http.get(url, headers=headers) as response:
                return response.status, await response.text()

        async with asyncio.timeout(30):
            while (await health(None))[0] != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for name in (None, "red"):
            status, text = await health(name)
            assert status == 503
            assert "an operator's key shows the names" in text
            assert not re.search(r"engine|pool|prefill|decode", text)
        status, text = await health("operator")
        assert status == 503
        assert "engine prefill" in text


async def test_a_stream_names_no_software_either(world: World) -> None:
    body = {"prompt": "hi", "stream": True}
    async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.headers.getall("Server") == ["prfaas"]
