"""An address translator that forgets silent connections, and requests whose answer takes longer."""

import asyncio
import sys

import pytest

from tests.lab.wan import Wan, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "can run"),
    pytest.mark.timeout(180),
]

IDLE_S, ANSWER_S, LIMIT_S = 4.0, 10.0, 30.0
ENGINE = f"""
import asyncio
from aiohttp import web

async def answer(request):
    await asyncio.sleep({ANSWER_S})
    return web.Response(text="computed")

async def main():
    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 7000).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
GATEWAY = f"""
import asyncio, sys, aiohttp
from prfaas.wire.sockets import request_socket

async def main():
    factory = request_socket if sys.argv[2] == "kept" else None
    connector = aiohttp.TCPConnector(socket_factory=factory)
    timeout = aiohttp.ClientTimeout(total={LIMIT_S})
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        try:
            async with http.get(f"http://{{sys.argv[1]}}:7000/") as response:
                print(await response.text())
        except TimeoutError:
            print("hung")

asyncio.run(main())
"""


@pytest.mark.parametrize(("kind", "expected"), [("plain", "hung"), ("kept", "computed")])
async def test_the_answer_of_a_leg_comes_over_a_path_that_forgets(kind: str, expected: str) -> None:
    async with Wan(rtt_ms=20, idle_s=IDLE_S) as wan:
        engine = await wan.run("a", [sys.executable, "-c", ENGINE], stdout=-1)
        assert engine.stdout is not None
        assert await engine.stdout.readline() == b"ready\n"
        command = [sys.executable, "-c", GATEWAY, wan.address("a"), kind]
        gateway = await wan.run("b", command, stdout=-1)
        said, _ = await asyncio.wait_for(gateway.communicate(), 2 * LIMIT_S)
        assert said.decode().strip() == expected
        counters = await wan.counters()
        forgotten = counters.there.forgotten + counters.back.forgotten
        assert (forgotten > 0) is (kind == "plain")
