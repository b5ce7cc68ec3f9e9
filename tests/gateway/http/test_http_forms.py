"""HTTP as on an engine's port: what is taken, and words for what is not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import io
import json
import resource
import socket
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.conftest import World, running, until
from tests.gateway.scripted_engine import ScriptedEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
PACKED = gzip.compress(BODY, mtime=0)
JSON = {"Content-Type": "application/json"}
PAGE = "https://chat.example.net"


async def post(
    world: World, data: bytes, path: str = COMPLETIONS, **headers: str
) -> tuple[int, str]:
    named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    async with world.http.post(world.url + path, data=io.BytesIO(data), headers=named) as reply:
        return reply.status, await reply.text()


@pytest.mark.parametrize("num_bytes", [9_000, 70_000])
async def test_long_headers_and_queries_are_taken(world: World, num_bytes: int) -> None:
    long = "x" * num_bytes
    assert (await post(world, BODY, Authorization=f"Bearer {long}"))[0] == 200
    assert (await post(world, BODY, f"{COMPLETIONS}?a={long}"))[0] == 200


async def test_a_longer_header_is_refused_by_its_limit(world: World) -> None:
    status, said = await post(world, BODY, X_Much="x" * 100_000)
    assert (status, "more than 98304 bytes" in said) == (431, True)


async def test_a_head_without_an_end_ends_its_connection(world: World) -> None:
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\n")
    # Fewer headers than a parser counts, each as long as one may be.
    for number in range(20):
        writer.write(b"X-%d: %b\r\n" % (number, b"x" * 90_000))
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "DEFLATE", "identity", "raw"])
async def test_bodies_may_be_compressed(world: World, coding: str) -> None:
    raw = zlib.compressobj(wbits=-15)
    data = {
        "deflate": zlib.compress(BODY),
        "identity": BODY,
        "raw": raw.compress(BODY) + raw.flush(),
    }.get(coding.lower(), gzip.compress(BODY, mtime=0))
    name = "deflate" if coding == "raw" else coding
    assert (await post(world, data, Content_Encoding=name))[0] == 200


@pytest.mark.parametrize("coding", ["zstd", "br", "gzip, gzip", "rot13"])
async def test_other_encodings_are_refused_with_the_list(world: World, coding: str) -> None:
    status, said = await post(world, BODY, Content_Encoding=coding)
    assert status == 415
    assert "identity, gzip, x-gzip, deflate" in said


@pytest.mark.parametrize(
    "data", [PACKED[:-4], b"x" + PACKED, BODY], ids=["cut", "shifted", "plain"]
)
async def test_a_body_that_is_not_what_it_says_is_a_400(world: World, data: bytes) -> None:
    status, said = await post(world, data, Content_Encoding="gzip")
    assert (status, "does not match its Content-Encoding" in said) == (400, True)


@pytest.mark.parametrize("is_packed", [False, True])
async def test_too_large_a_body_names_the_setting(world: World, is_packed: bool) -> None:
    data = b"x" * (8 * 2**20 + 1000)
    more = {"Content_Encoding": "gzip"} if is_packed else {}
    status, said = await post(world, gzip.compress(data, mtime=0) if is_packed else data, **more)
    assert (status, "gateway.body_bytes_max" in said) == (413, True)


@functools.cache
def bomb(num_bytes: int) -> bytes:
    """A small body that becomes a large one."""
    packer = zlib.compressobj(9, wbits=31)
    piece = bytes(1 << 20)
    return b"".join(packer.compress(piece) for _ in range(num_bytes >> 20)) + packer.flush()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("POST", COMPLETIONS, 413),
        ("POST", "/nowhere", 404),
        ("POST", "/control/threshold", 413),
    ],
)
async def test_a_body_is_not_inflated_before_it_is_decided_upon(
    world: World, method: str, path: str, status: int
) -> None:
    """Inflating one of these takes 0.6 s of CPU and more; five of them are sent."""
    data = bomb(1 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(5):
        headers = JSON | {"Content-Encoding": "gzip"}
        url = world.url + path
        async with world.http.request(method, url, data=data, headers=headers) as reply:
            assert reply.status == status, await reply.text()
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/octet-stream", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/xml", 415),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_a_body_is_json_by_its_type(world: World, path: str, kind: str, status: int) -> None:
    found, said = await post(world, BODY, path, Content_Type=kind)
    assert found == status, said
    assert status == 200 or "application/json" in said


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "//v1//completions//", "/a.b/c/"])
async def test_a_slash_at_the_end_leads_to_the_path_without_it(world: World, path: str) -> None:
    url = f"{world.url}{path}?full=1"
    async with world.http.post(url, data=BODY, headers=JSON, allow_redirects=False) as reply:
        assert reply.status == 307
        target = reply.headers["Location"]
    assert target == f"/{path.strip('/')}?full=1"
    async with world.http.post(f"{world.url}{COMPLETIONS}/", data=BODY, headers=JSON) as reply:
        assert reply.status == 200


def asks(origin: str = PAGE) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }


async def test_pages_of_other_origins_are_refused_by_the_setting(world: World) -> None:
    async with world.http.options(world.url + CHAT, headers=asks()) as reply:
        assert reply.status == 403
        assert "gateway.allowed_origins" in await reply.text()
        assert "Access-Control-Allow-Origin" not in reply.headers
    async with world.http.get(f"{world.url}/v1/models", headers={"Origin": PAGE}) as reply:
        assert "Access-Control-Allow-Origin" not in reply.headers


@pytest.mark.parametrize("listed", [[PAGE], ["*"]])
async def test_pages_of_listed_origins_use_the_paths_of_clients(
    checkpoint: Path, identities: Path, tmp_path: Path, listed: list[str]
) -> None:
    gateway = {"allowed_origins": listed}
    async with running(checkpoint, identities, tmp_path / "s", gateway=gateway) as world:
        async with world.http.options(world.url + CHAT, headers=asks()) as reply:
            assert reply.status == 204
            assert reply.headers["Access-Control-Allow-Origin"] == PAGE
            assert "authorization" in reply.headers["Access-Control-Allow-Headers"]
        headers = JSON | {"Origin": PAGE}
        async with world.http.post(world.url + COMPLETIONS, data=BODY, headers=headers) as reply:
            assert reply.status == 200
            assert reply.headers["Access-Control-Allow-Origin"] == PAGE
            assert reply.headers["Vary"] == "Origin"
        # An error can be read as well; what is for operators can not.
        async with world.http.post(world.url + COMPLETIONS, data=b"{", headers=headers) as reply:
            assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (400, PAGE)
        for path in ("/control/requests", "/metrics", "/kv/lookup"):
            async with world.http.options(world.url + path, headers=asks()) as reply:
                assert reply.status == 403
                assert "Access-Control-Allow-Origin" not in reply.headers
        other = asks("https://evil.example")
        async with world.http.options(world.url + CHAT, headers=other) as reply:
            assert reply.status == (204 if listed == ["*"] else 403)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")
async def test_every_address_of_ipv6_is_every_one_of_ipv4(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    gateway = {"listen": "[::]:0"}
    async with running(checkpoint, identities, tmp_path / "s", gateway=gateway) as world:
        port = world.url.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            async with world.http.get(f"http://{host}:{port}/health") as reply:
                assert reply.status == 200


async def hold(release: asyncio.Event, engine: ScriptedEngine, request: Any, body: Any) -> Any:
    """Answers once it is let."""
    engine.hanging.set()
    await release.wait()
    return await engine.answer(request, body)


class TestStreamsThatWait:
    """Streams whose first token takes its time."""

    @pytest.fixture
    def times(self) -> Any:
        from dataclasses import replace

        from prfaas.gateway.times import TIMES

        return replace(TIMES, stream_head_s=0.01, stream_comment_s=0.01)

    async def test_the_head_comes_at_once_and_comments_until_the_first_token(
        self, world: World
    ) -> None:
        release = asyncio.Event()
        world.decode.script = lambda *args: hold(release, *args)
        body = {"prompt": "hi", "stream": True}
        async with world.http.post(world.url + COMPLETIONS, json=body) as reply:
            assert reply.status == 200
            assert reply.headers["X-Prfaas-Path"] == "local"
            for _ in range(3):
                assert (
                    await reply.content.readuntil(b"\n\n") == b": waiting for the first token\n\n"
                )
            release.set()
            text = (await reply.read()).decode()
        events = [line for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert len(events) > 1
        await until(lambda: not world.gateway.connections.num_busy)

    @pytest.mark.parametrize("status", [400, 500, 503])
    async def test_an_error_after_the_head_is_an_event(self, world: World, status: int) -> None:
        from tests.gateway.scripted_engine import refuse

        release = asyncio.Event()

        async def late(engine: ScriptedEngine, request: Any, body: Any) -> Any:
            engine.hanging.set()
            await release.wait()
            return await refuse(status, "not today")(engine, request, body)

        world.decode.script = late
        body = {"prompt": "hi", "stream": True}
        async with world.http.post(world.url + COMPLETIONS, json=body) as reply:
            assert reply.status == 200
            await reply.content.readuntil(b"\n\n")
            release.set()
            text = (await reply.read()).decode()
        *_, error, done = [line for line in text.splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] in (status, 502, 503)
        record = await world.record()
        assert record["outcome"] in ("rejected", "failed")

    async def test_another_engine_takes_over_after_the_head(self, world: World) -> None:
        world.spare.healthy = True
        await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
        hanging: list[ScriptedEngine] = []
        release = asyncio.Event()

        async def die(engine: ScriptedEngine, request: Any, body: Any) -> Any:
            hanging.append(engine)
            await release.wait()
            if hanging[0] is engine:
                request.transport.abort()
            return await engine.answer(request, body)

        world.decode.script = world.spare.script = die
        body = {"prompt": "hi", "stream": True}
        async with world.http.post(world.url + COMPLETIONS, json=body) as reply:
            await reply.content.readuntil(b"\n\n")
            release.set()
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        assert len({engine.name for engine in hanging}) == 2

    async def test_a_client_that_leaves_while_it_waits_is_noticed(self, world: World) -> None:
        release = asyncio.Event()
        world.decode.script = lambda *args: hold(release, *args)
        reply: aiohttp.ClientResponse
        body = {"prompt": "hi", "stream": True}
        async with world.http.post(world.url + COMPLETIONS, json=body) as reply:
            await reply.content.readuntil(b"\n\n")
            reply.close()
        await until(lambda: not world.gateway.connections.num_busy)
        assert (await world.record())["outcome"] == "cancelled"
        release.set()
