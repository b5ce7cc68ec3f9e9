"""Orders of operators on the blocks of one prompt: pins and copies, through `prfaas ctl prefix`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prfaas.core.control.changes import Loop
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from prfaas.prefixes.pins import PIN_NS, PINS_MAX, REPEAT_NS
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Refused
from tests.gateway.conftest import LAYOUT, World, annexes_of, running, until
from tests.gateway.ctl_runner import run
from tests.gateway.prompts import LONG

HELD = 320
"""Tokens of the prompt that the PrfaaS pool holds: up to the last checkpoint."""
REQUEST = "mine-1234"
URL = "/control/prefixes"
NUM_BYTES = HELD // 16 * 1024 + 2048


@asynccontextmanager
async def asked(checkpoint: Path, identities: Path, directory: Path) -> AsyncIterator[World]:
    """A gateway that has served a prompt, of which the PrfaaS pool holds the beginning."""
    routing = {"policy": "local"}
    async with running(checkpoint, identities, directory / "state", routing=routing) as world:
        await ask(world, REQUEST, LONG)
        keys = world.keys(world.decode.calls[-1].body["prompt"], HELD)
        world.prfaas_pool.store(LAYOUT, keys)
        index = world.gateway.index
        await until(lambda: index.num_blocks("prfaas-pool") == HELD // 16 + 1)
        yield world


async def ask(world: World, request_id: str, prompt: str) -> None:
    body, headers = {"model": "tiny", "prompt": prompt}, {"X-Request-Id": request_id}
    async with world.http.post(
        f"{world.url}/v1/completions", json=body, headers=headers
    ) as response:
        assert response.status == 200


async def order(world: World, **body: Any) -> tuple[int, dict[str, Any]]:
    return await world.post({"request": REQUEST, **body}, URL)


async def test_a_copy_shows_its_cost_and_moves_the_blocks(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        status, shown = await order(world, pool="pd-pool", dry_run=True)
        assert (status, shown["source"], shown["tokens"]) == (200, "prfaas-pool", HELD)
        assert (shown["num_bytes"], shown["decision"], shown["have_tokens"]) == (NUM_BYTES, None, 0)
        assert world.pd_pool.pulls == []
        copying = asyncio.create_task(order(world, pool="pd-pool"))
        await until(lambda: bool(world.pd_pool.pulls))
        [pull] = world.pd_pool.pulls
        promised = world.gateway.driver.dispatcher
        assert promised.promised_bytes == NUM_BYTES
        keys = keys_of(pull.keys)
        assert len(keys) == HELD // 16 + 1
        world.pd_pool.store(LAYOUT, keys)
        world.pd_pool.end_transfer(pull.transfer_id.hex())
        status, done = await copying
        assert (status, done["problem"], done["decision"]["action"]) == (200, "", "copy")
        assert promised.promised_bytes == 0
        [entry] = world.gateway.journal.latest(1)
        assert (entry.loop, entry.what) == (Loop.OPERATOR, f"prompt of request {REQUEST}")
        status, again = await order(world, pool="pd-pool")
        assert status == 409
        assert (
            "of this prompt pd-pool lacks nothing that prfaas-pool holds"
            in again["error"]["message"]
        )


async def test_a_copy_that_a_pool_refuses_is_told(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        copying = asyncio.create_task(
            run("prefix", "copy", REQUEST, "--to", "pd-pool", url=world.url)
        )
        await until(lambda: bool(world.pd_pool.pulls))
        transfer_id = world.pd_pool.pulls[0].transfer_id
        world.pd_pool.send(Refused(transfer_id=transfer_id, reason="region"))
        told = await copying
        assert told.exit_code == 1
        assert "prfaas-pool to pd-pool  NOT DONE: refused" in told.output
        assert "320 tokens" in told.output
        assert world.gateway.driver.dispatcher.promised_bytes == 0


async def test_a_caller_who_leaves_leaves_nothing_behind(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        copying = asyncio.create_task(order(world, pool="pd-pool"))
        await until(lambda: bool(world.pd_pool.pulls))
        copying.cancel()
        world.pd_pool.end_transfer(world.pd_pool.pulls[0].transfer_id.hex(), "expired")
        await until(lambda: world.gateway.driver.dispatcher.promised_bytes == 0)


async def test_orders_for_nothing_are_refused_with_a_reason(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        for body, status, reason in (
            ({"pool": "nowhere"}, 404, "known pools: prfaas-pool, pd-pool"),
            ({"pool": "pd-pool", "source": "nowhere"}, 404, "known pools"),
            ({}, 400, "give the pool"),
            ({"pool": "prfaas-pool"}, 409, "no link is up from any pool to prfaas-pool"),
            ({"pool": "nowhere", "for_s": 60}, 404, "known pools"),
            ({"for_s": -1}, 400, "for_s"),
            ({"for_s": 1e9}, 400, "for_s"),
            ({"request": "nobody-knows", "for_s": 60}, 404, "no such request"),
        ):
            found, answer = await order(world, **body)
            assert (found, reason in answer["error"]["message"]) == (status, True), answer
        assert world.gateway.journal.latest(1) == []


async def test_a_pin_is_repeated_until_its_end_at_every_pool(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        status, report = await order(world, for_s=600)
        assert (status, report["num_blocks"], report["num_bytes"]) == (200, 6, 6144)
        assert [pool["problem"] for pool in report["pools"]] == ["", ""]
        pools, control_ticker = (world.prfaas_pool, world.pd_pool), world.gateway.control_ticker
        first = [pool.pins[0] for pool in pools]
        tag = world.gateway.tenants.tag_of(DEFAULT_NAME)
        assert {message.for_ns for message in first} == {PIN_NS}
        assert {message.tenant for message in first} == {tag}
        now_ns = time.monotonic_ns()
        control_ticker.beat(now_ns + REPEAT_NS, is_turn=False)
        await until(lambda: all(len(pool.pins) == 2 for pool in pools))
        control_ticker.beat(now_ns + REPEAT_NS, is_turn=False)
        control_ticker.beat(now_ns + 600 * 10**9 - NS_LEFT, is_turn=False)
        await until(lambda: all(len(pool.pins) == 3 for pool in pools))
        assert {pool.pins[-1].for_ns <= NS_LEFT for pool in pools} == {True}
        control_ticker.beat(now_ns + 601 * 10**9, is_turn=False)
        assert len(annexes_of(world).steering.pins) == 0


NS_LEFT = 10 * 10**9


async def test_ctl_counts_before_it_pins_and_ends_a_pin(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        done = await run("prefix", "pin", REQUEST[:8], "--pool", "pd-pool", url=world.url)
        assert done.exit_code == 0, done.output
        has, pinned = "pd-pool  has 3 blocks, 3.0 KiB", "pd-pool  pinned 3 blocks, 3.0 KiB for"
        assert done.output.index(has) < done.output.index(pinned)
        assert [message.is_dry for message in world.pd_pool.pins] == [True, False]
        assert world.prfaas_pool.pins == []
        over = await run("prefix", "unpin", REQUEST, url=world.url)
        assert (over.exit_code, "not pinned any more" in over.output) == (0, True)
        assert world.pd_pool.pins[-1].for_ns == 0
        assert len(annexes_of(world).steering.pins) == 0


async def test_a_pool_that_is_gone_is_named_and_the_others_pin(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        await world.prfaas_pool.stop()
        await until(lambda: not world.gateway.pools.is_live("prfaas-pool"))
        done = await run("prefix", "pin", REQUEST, url=world.url)
        assert done.exit_code == 1
        assert "prfaas-pool  NOT DONE: not connected" in done.output
        assert "pd-pool  pinned 3 blocks" in done.output


OLDER = "its version does not know the order order; upgrade the pool node"


def problems(report: dict[str, Any]) -> dict[str, str]:
    return {pool["name"]: pool["problem"] for pool in report["pools"]}


async def test_a_pool_node_of_an_older_version_gets_no_pins_and_keeps_its_stream(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """It would end the connection at a message that it does not know, and at each repetition."""
    async with asked(checkpoint, identities, tmp_path) as world:
        world.pd_pool.takes.remove("order")
        world.pd_pool.disconnect()
        await until(lambda: world.pd_pool.num_subscriptions == 2)
        await until(lambda: world.gateway.pools.is_live("pd-pool"))
        status, report = await order(world, for_s=3600)
        assert (status, problems(report)) == (200, {"pd-pool": OLDER, "prfaas-pool": ""})
        pins = annexes_of(world).steering.pins
        pins.beat(time.monotonic_ns() + REPEAT_NS + 1)
        await until(lambda: len(world.prfaas_pool.pins) == 2)
        assert world.pd_pool.num_subscriptions == 2
        assert world.gateway.pools.is_live("pd-pool")


async def test_a_pool_node_that_does_not_know_an_order_after_all_says_so(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        world.pd_pool.takes.remove("order")
        status, report = await order(world, pool="pd-pool", for_s=3600)
        assert (status, problems(report)) == (200, {"pd-pool": OLDER})
        assert world.pd_pool.num_subscriptions == 1


async def test_a_gateway_has_a_limit_of_pins(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with asked(checkpoint, identities, tmp_path) as world:
        for number in range(PINS_MAX):
            await ask(world, f"other-{number:04}", f"{number:04} " * 60)
            assert (await order(world, request=f"other-{number:04}", for_s=60))[0] == 200
        status, refused = await order(world, for_s=60)
        assert status == 409
        assert f"there are {PINS_MAX} pins" in refused["error"]["message"]
