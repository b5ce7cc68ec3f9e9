"""The demo reads the answers of a gateway as they are streamed."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.cli.deploy.demo_client import streamed_text
from prfaas.errors import EngineError

WAITING = b": waiting for blocks\n\n"
END = b"data: [DONE]\n\n"


def chunk(text: str) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % text.encode()


async def read(*parts: bytes) -> str:
    """The text that is read of a stream with these parts, over a socket."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession() as session,
        session.post(server.make_url("/")) as reply,
    ):
        return await streamed_text(reply)


async def test_comments_of_a_stream_that_waits_are_skipped() -> None:
    assert await read(WAITING, chunk("one"), WAITING, WAITING, chunk(" two"), END) == "one two"


async def test_a_stream_of_comments_alone_is_an_empty_answer() -> None:
    assert await read(WAITING, b":\n\n", END) == ""


async def test_an_error_in_the_stream_is_reported() -> None:
    with pytest.raises(EngineError, match="the stream broke: gone"):
        await read(WAITING, chunk("one"), b'data: {"error": "gone"}\n\n')
