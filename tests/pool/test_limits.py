"""A node that runs out of file descriptors gets over it."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import World
from .sites import LOOPBACK, PROMPT, source, until


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    fillers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("port", ["link", "engines"])
async def test_a_node_without_descriptors_serves_again_once_there_are_some(
    world: World, caplog: pytest.LogCaptureFixture, port: str
) -> None:
    pd = await world.start_pd()
    place: tuple[str, int] | str
    if port == "link":
        caller, place = socket.socket(), (LOOPBACK, pd.port)
    else:
        caller, place = socket.socket(socket.AF_UNIX), str(world.sockets / "pd-pool.sock")
    caller.setblocking(False)
    with caller:
        with no_descriptors():
            await asyncio.get_running_loop().sock_connect(caller, place)
            await until(lambda: "no connection can be accepted" in caplog.text)
        assert pd.is_running
    engine = await world.engine("pd-pool")
    assert await engine.store(PROMPT)
    peer = await source(pd, world.identities)
    await until(lambda: pd.node.inbound.channels.is_connected("prfaas-pool"))
    peer.channel.close("done")
