"""The state of a pool node, as probes see it."""

import asyncio

import aiohttp
import pytest

from prfaas.pool.node.admin_http import AdminServer, NodePhase
from tests.pool.conftest import World


async def ask(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as reply,
    ):
        return reply.status, (await reply.json())["status"]


async def test_a_node_is_ready_and_then_drains_and_lives_all_the_while(world: World) -> None:
    prfaas, _, prefill, _ = await world.two_sites()
    port = prfaas.node.admin_port
    assert await ask(port, "/health") == (200, "ready")
    prefill.push()
    await asyncio.create_task(prfaas.node.drain(0.01))
    assert await ask(port, "/health") == (503, "draining")
    assert await ask(port, "/live") == (200, "draining")


async def test_a_node_that_can_move_no_blocks_has_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prfaas, _, _, _ = await world.two_sites()
    with monkeypatch.context() as patched:
        patched.setattr(prfaas.node.link_room.io._thread, "is_alive", lambda: False)
        assert await ask(prfaas.node.admin_port, "/health") == (503, "failed")
        assert await ask(prfaas.node.admin_port, "/live") == (503, "failed")
    assert await ask(prfaas.node.admin_port, "/health") == (200, "ready")


@pytest.mark.parametrize("phase", NodePhase)
async def test_every_state_has_its_answers(world: World, phase: NodePhase) -> None:
    prfaas, _, _, _ = await world.two_sites()
    server = AdminServer(prfaas.node.metrics, ("127.0.0.1", 0), lambda: phase)
    await server.open()
    try:
        ready, alive = await ask(server.port, "/health"), await ask(server.port, "/live")
    finally:
        await server.close()
    assert ready == (200 if phase is NodePhase.READY else 503, phase.value)
    assert alive == (503 if phase is NodePhase.FAILED else 200, phase.value)
