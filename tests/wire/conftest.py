"""A framed TLS server on loopback, and the identities around it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prfaas.wire.channel import Channel
from prfaas.wire.frames import Frame
from prfaas.wire.identity import identity_in, make_authority, make_identity, peer_name

ALLOWED = frozenset({"alice"})


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` holds; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the conditions are attributes, nobody signals them
        await asyncio.sleep(0.001)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("identities")
    make_authority(directory)
    for name in ("server", "alice", "mallory"):
        make_identity(directory, name)
    return directory


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another deployment's authority, which also knows an alice."""
    directory = tmp_path_factory.mktemp("foreign")
    make_authority(directory)
    make_identity(directory, "alice")
    return directory


@dataclass
class Server:
    """Connections and frames of a server."""

    port: int = 0
    opened: list[str] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)

    def greet(self, channel: Channel) -> None:
        self.channels.append(channel)
        channel.peer = peer_name(channel.ssl_object, ALLOWED)
        self.opened.append(channel.peer)


@pytest.fixture
async def server(identities: Path) -> AsyncIterator[Server]:
    seen = Server()
    listener = await asyncio.get_running_loop().create_server(
        lambda: Channel(
            lambda _, frame: seen.frames.append(frame),
            lambda _, reason: seen.closed.append(reason),
            seen.greet,
        ),
        "127.0.0.1",
        0,
        ssl=identity_in(identities, "server").server_context(),
    )
    seen.port = listener.sockets[0].getsockname()[1]
    yield seen
    listener.close()
    for channel in seen.channels:
        channel.close("the test is over")
    await until(lambda: len(seen.closed) == len(seen.channels))
