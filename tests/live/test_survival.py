"""It survives: whatever is killed, cut or garbled, the client gets the right answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest

from tests.live.conftest import Live, document, until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]

DEADLINE_S = 30.0
LONG = 12000


async def ask(live: Live, text: str) -> tuple[str, dict[str, Any]]:
    """The answer to a long prompt, and the gateway's record of it."""
    async with asyncio.timeout(DEADLINE_S):
        answer, headers = await live.chat(text)
    record = await live.record(headers["X-Request-Id"])
    return str(answer["choices"][0]["message"]["content"]), record


async def fallbacks(live: Live) -> float:
    return await live.metric(live.url, "prfaas_fallback_total")


async def blocks_stored(live: Live) -> float:
    return await live.metric(live.pool_admin("prfaas-pool"), "prfaas_pool_blocks_stored_total")


async def moving(live: Live, before: float) -> None:
    """Wait until the prefill engine has handed over the first blocks of a prompt."""

    async def more() -> bool:
        return await blocks_stored(live) > before

    await until(more)


def kill(live: Live, name: str) -> None:
    live.supervisor.part(name).signal(signal.SIGKILL)


async def survives(live: Live, tag: str, harm: Any) -> dict[str, Any]:
    """Send a long prompt, do harm once its blocks are moving, compare the answer."""
    await live.remote_again(f"before {tag}")
    text = f"[{tag}] " + document(LONG)
    counted, stored = await fallbacks(live), await blocks_stored(live)
    asking = asyncio.create_task(ask(live, text))
    await moving(live, stored)
    await harm()
    answer, record = await asking
    assert answer == await live.alone(text, tag)
    assert record["outcome"] == "finished"
    assert record["fallback"] is not None, record
    assert await fallbacks(live) == counted + 1
    log = (live.topology.deployment.state / "logs" / "gateway.log").read_text()
    assert record["request_id"] in log
    return record


async def test_the_source_pool_is_killed(live: Live) -> None:
    async def harm() -> None:
        kill(live, "prfaas-pool")

    await survives(live, "source pool", harm)
    answer, record = await ask(live, "[no source pool] " + document(3000))
    assert record["path"] == "local"
    assert answer == await live.alone("[no source pool] " + document(3000), "no source pool")
    await live.supervisor.restart("prfaas-pool")
    await live.remote_again("source pool")


async def test_the_destination_pool_is_killed(live: Live) -> None:
    async def harm() -> None:
        kill(live, "pd-pool")

    await survives(live, "destination pool", harm)
    await live.supervisor.restart("pd-pool")
    await live.remote_again("destination pool")


async def test_the_link_is_cut(live: Live) -> None:
    live.relay.cut_after(1_000_000)
    text = "[cut] " + document(LONG)
    counted = await fallbacks(live)
    answer, record = await ask(live, text)
    assert live.relay.was_cut.is_set()
    assert answer == await live.alone(text, "cut")
    # Back within the grace time the link goes on with the transfer; a slow machine may need longer.
    gave_up = record["fallback"] is not None
    assert record["transfer_state"] == ("aborted" if gave_up else "committed")
    assert await fallbacks(live) == counted + gave_up
    await live.remote_again("cut")


async def test_the_link_swallows_everything(live: Live) -> None:
    """A blackhole says nothing; both ends have to notice by themselves."""

    async def harm() -> None:
        live.relay.hold()

    try:
        record = await survives(live, "blackhole", harm)
        assert record["fallback"]["stage"] == "transfer"
    finally:
        live.relay.release()
    await live.remote_again("blackhole")


async def test_garbage_on_the_pool_ports(live: Live) -> None:
    refused = await live.metric(live.pool_admin("pd-pool"), "prfaas_transfers_total")
    text = "[garbage] " + document(LONG)
    asking = asyncio.create_task(ask(live, text))
    for pool in ("pd-pool", "prfaas-pool"):
        for size in (1, 100, 100_000):
            reader, writer = await asyncio.open_connection(*live.topology.pools[pool])
            with contextlib.suppress(OSError):  # It may be gone before it has heard everything.
                writer.write(os.urandom(size))
                writer.write_eof()
                assert len(await reader.read()) < 1000
            writer.close()
    answer, record = await asking
    assert answer == await live.alone(text, "garbage")
    assert (record["path"], record["fallback"]) == ("remote", None)
    assert await live.metric(live.pool_admin("pd-pool"), "prfaas_transfers_total") == refused + 1


async def test_a_client_that_leaves_cancels_everything(live: Live) -> None:
    stored = await blocks_stored(live)
    body = live.chat_body("[leaver] " + document(LONG), max_tokens=2000)
    url, headers = f"{live.url}/v1/chat/completions", {"X-Request-Id": "leaver"}
    asking = asyncio.create_task(live.http.post(url, json=body, headers=headers))
    await moving(live, stored)
    asking.cancel()
    record = await live.record("leaver")
    assert record["outcome"] == "cancelled"
    for engine in ("prfaas-engine", "pd-engine"):

        async def idle(url: str = live.topology.engines[engine]) -> bool:
            return await live.metric(url, "vllm:num_requests_running") == 0

        await until(idle)


async def test_the_prefill_engine_is_killed_mid_prefill(live: Live) -> None:
    seen = "[before the kill] " + document(3000)
    await ask(live, seen)

    async def device(state: str, hit: bool) -> None:
        """Wait until the index knows so much of the engine's own cache."""

        async def known() -> bool:
            found = (await live.look(seen))["prfaas-engine"]
            return (found["state"], bool(found["hit_tokens"])) == (state, hit)

        await until(known)

    await device("exact", hit=True)

    async def harm() -> None:
        kill(live, "prfaas-engine")

    record = await survives(live, "prefill engine", harm)
    assert record["fallback"]["stage"] == "prefill"
    _, record = await ask(live, "[no prefill engine] " + document(3000))
    assert (record["path"], record["reason"]) == ("local", "no_prefill_instance")
    await device("degraded", hit=False)
    await live.supervisor.restart("prfaas-engine")
    await device("exact", hit=False)
    await live.remote_again("prefill engine")
