"""Peers that speak an older version of the protocol."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.wire.frames import FrameDecoder, VersionError
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.base import Goodbye
from prfaas.wire.messages.codec import encode

from .conftest import World, until
from .prompts import LONG

OLD = 1


class OldPool(asyncio.Protocol):
    """The pool node of version 1: refuses frames of any other version in its own, and closes."""

    def __init__(self) -> None:
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        version = data[4]
        if version != OLD:
            why = f"frame version {version}; this side speaks {OLD}"
            self._transport.write(encode(Goodbye(reason=why), OLD))
            self._transport.close()


async def test_an_old_pool_node_is_named_and_no_request_is_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pool, index = world.prfaas_pool, world.gateway.index
    await pool.stop()
    await until(lambda: not index.is_live(pool.name))
    tls = identity_in(pool.identities, pool.name).server_context()
    old = await asyncio.get_running_loop().create_server(OldPool, "127.0.0.1", pool.port, ssl=tls)
    why = str(VersionError(OLD))
    await until(lambda: any(why in record.getMessage() for record in caplog.records))
    status, _ = await world.post({"prompt": LONG, "max_tokens": 3})
    record = await world.record()
    assert (status, record["path"], record["fallback"]) == (200, "local", None)
    old.close()
    await old.wait_closed()
