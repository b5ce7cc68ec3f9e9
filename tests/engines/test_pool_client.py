"""An engine's connection to its pool node: never waits, always comes back, tells every loss."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prfaas.core.kv.blocks import CacheGroup, GroupKind, Layout
from prfaas.engines.pool_client import LIMITS, ClientLimits, PoolConnection
from prfaas.wire.frames import FrameDecoder
from prfaas.wire.messages.base import Ping
from prfaas.wire.messages.codec import AnyMessage, decode, encode
from prfaas.wire.messages.engine import EngineHello, StoreDone, Touch
from prfaas.wire.messages.layouts import layout_spec

LAYOUT = Layout(b"L" * 32, 16, "0", (CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 128),))
HELLO = EngineHello(
    engine="e", layout=layout_spec(LAYOUT), row_bytes=128, num_rows=2, extents={0: [(0, 128)]}
)
BIG = Touch(keys=[(0, b"h" * 32)] * 1000)
PATIENCE_S = 10.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


class Scene:
    """A pool node's socket in the test's hands, and a client that dials it."""

    def __init__(self, path: Path, outbox_max: int = LIMITS.outbox_max) -> None:
        self.path = path
        self.listener = self.listen()
        self.messages: list[AnyMessage] = []
        self.losses = 0
        self.descriptor = os.memfd_create("rows")
        self.client = PoolConnection(
            path,
            HELLO,
            self.descriptor,
            self.messages.append,
            self.lost,
            ClientLimits(retry_s=0.01, outbox_max=outbox_max),
        )

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.settimeout(PATIENCE_S)
        listener.bind(str(self.path))
        listener.listen()
        return listener

    def lost(self) -> None:
        self.losses += 1

    def accept(self) -> socket.socket:
        """Take the hello and its descriptor, and accept the engine."""
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE_S)
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        (frame,) = FrameDecoder().feed(data)
        assert decode(frame.payload) == HELLO
        (descriptor,) = descriptors
        assert os.path.sameopenfile(descriptor, self.descriptor)
        os.close(descriptor)
        connection.sendall(encode(Ping()))
        until(lambda: self.client.is_connected)
        return connection

    def close(self) -> None:
        self.client.close()
        self.listener.close()
        os.close(self.descriptor)
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if name.startswith("prfaas-pool")]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "pool.sock")
    yield made
    made.close()


def test_messages_go_both_ways_once_the_pool_has_spoken(scene: Scene) -> None:
    assert not scene.client.send(Ping())
    with scene.accept() as pool:
        pool.sendall(encode(StoreDone(job=1, stored=True)))
        until(lambda: scene.messages == [StoreDone(job=1, stored=True)])
        assert scene.client.send(BIG)
        data = b""
        while len(data) < len(encode(BIG)):
            data += pool.recv(1 << 16)
        assert data == encode(BIG)


def test_a_lost_pool_is_told_once_and_dialled_again(scene: Scene) -> None:
    scene.accept().close()
    until(lambda: scene.losses == 1)
    assert not scene.client.is_connected
    assert not scene.client.send(Ping())
    with scene.accept():
        assert scene.losses == 1
        assert scene.client.send(Ping())


def test_a_pool_that_is_not_there_yet_is_found_when_it_comes(scene: Scene) -> None:
    scene.listener.close()
    scene.path.unlink()
    assert not scene.client.is_connected
    scene.listener = scene.listen()
    with scene.accept():
        assert scene.client.is_connected


def test_a_pool_that_refuses_the_hello_is_no_loss(scene: Scene) -> None:
    for _ in range(3):
        connection, _ = scene.listener.accept()
        connection.close()
    with scene.accept():
        assert scene.losses == 0


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", encode(Ping())[:12] + b"\xc1" * 99])
def test_garbage_from_the_pool_is_a_loss(scene: Scene, garbage: bytes) -> None:
    with scene.accept() as pool:
        pool.sendall(garbage)
        until(lambda: scene.losses == 1)
    scene.accept().close()


def fill(scene: Scene, limit: int) -> int:
    """Send until the pool's socket takes no more and messages pile up."""
    return sum(scene.client.send(BIG) for _ in range(limit))


def test_garbage_is_a_loss_even_while_the_pool_reads_nothing(scene: Scene) -> None:
    with scene.accept() as pool:
        assert fill(scene, 100) == 100
        pool.sendall(b"\0" * 64)
        until(lambda: scene.losses == 1)
    scene.accept().close()


def test_a_pool_that_reads_nothing_is_given_up_when_the_queue_is_full(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pool.sock", outbox_max=20)
    with scene.accept():
        assert fill(scene, 200) < 200
        until(lambda: scene.losses == 1)
        assert not scene.client.is_connected
    scene.accept().close()
    until(lambda: scene.losses == 2)
    scene.close()


def test_closing_ends_the_threads_at_any_moment(tmp_path: Path) -> None:
    for number in range(20):
        scene = Scene(tmp_path / f"{number}.sock")
        scene.close()
