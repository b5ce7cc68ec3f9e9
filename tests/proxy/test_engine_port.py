"""The proxy's port for gateways, over TLS, in front of a timing engine: who gets what, and when."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.billing.report import Period, logs_in_folders, make_bill
from prfaas.proxy.bodies import read_prefill
from tests.engines.timing.worlds import MODEL
from tests.pool.sites import until
from tests.ports import free_port

from .worlds import BODY, running, write_contracts


async def test_a_gateway_prefills_and_reads_what_is_its_own(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with running(tmp_path, checkpoint) as world:
        assert await world.post("a") == 200
        assert await world.post("a") == 200
        assert world.metric("tokens_total", site="a", kind="asked") == 400
        assert 200 < world.metric("tokens_total", site="a", kind="computed") < 400
        assert await world.post("b") == 200
        assert world.metric("tokens_total", site="b", kind="computed") == 200
        assert (await world.get("a", "/health"))[0] == 200
        assert MODEL in (await world.get("b", "/v1/models"))[1]


async def test_the_load_is_that_of_the_site_alone(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint) as world:
        posts = [asyncio.create_task(world.post("a", prompt=[n] * 900)) for n in range(5)]
        await until(lambda: world.proxy._turns.queue.waiting_of("a", "engine") == 4)
        assert world.metric("waiting", site="a") == 4
        a, b = [(await world.get(site, "/metrics"))[1] for site in "ab"]
        assert "vllm:num_requests_waiting 4.0" in a
        assert "vllm:num_requests_running 1.0" in a
        assert "vllm:num_requests_waiting 0.0" in b
        assert "vllm:num_requests_running 0.0" in b
        for post in posts:
            post.cancel()
        await until(lambda: world.proxy._turns.queue.num_waiting("a") == 0)
        # Those that left cost no place.
        assert await world.post("b") == 200


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"cache_salt": "salt of b.of a user"}, 403),
        ({"cache_salt": ""}, 400),
        ({"max_tokens": 2}, 400),
        ({"stream": True}, 400),
        ({"priority": -1}, 400),
        ({"prompt": "text"}, 400),
        ({"prompt": []}, 400),
        ({"kv_transfer_params": {"prfaas": {}, "do_remote_prefill": True}}, 400),
        ({"kv_transfer_params": {"prfaas": {"wait": {"wait_ms": 10**9}}}}, 400),
        ({"kv_transfer_params": {"prfaas": {"wait_ms": 10**9}}}, 400),
    ],
)
async def test_nothing_but_a_prefill_of_the_site_is_passed_on(
    tmp_path: Path, checkpoint: Path, changes: dict[str, Any], status: int
) -> None:
    async with running(tmp_path, checkpoint) as world:
        assert await world.post("b") == 200
        assert await world.post("a", **changes) == status
        assert world.metric("tokens_total", site="a", kind="asked") == 0
        assert await world.post("a") == 200


async def test_strangers_and_other_paths_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint) as world:
        for who in ("stranger", "forger"):
            assert await world.post(who, cache_salt="x") == 403
            assert (await world.get(who, "/health"))[0] == 403
        for path in ("/reset_prefix_cache", "/v1/chat/completions", "/version"):
            async with world.sessions["a"].post(world.url + path, json=BODY) as reply:
                assert reply.status == 404
        assert world.metric("refused_total", reason="unknown") == 4


async def test_a_full_queue_is_refused_at_once(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint, "queued_max = 2") as world:
        posts = [asyncio.create_task(world.post("a", prompt=[n] * 900)) for n in range(6)]
        statuses = sorted(await asyncio.gather(*posts))
        assert statuses.count(429) == 3
        assert statuses.count(200) == 3


async def test_a_revoked_site_is_refused_and_its_requests_end(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with running(tmp_path, checkpoint) as world:
        port = world.proxy.ports["engine"]
        behind = world.proxy._engines["engine"].url
        posts = [asyncio.create_task(world.post("a", prompt=[n] * 900)) for n in range(4)]
        await until(lambda: world.proxy._turns.queue.waiting_of("a", "engine") == 3)
        write_contracts(tmp_path, port, behind, "b")
        answers = await asyncio.gather(*posts, return_exceptions=True)
        assert answers.count(403) == 3
        assert await world.post("b") == 200
        assert await world.post("a") == 403


async def test_the_bill_is_by_site(tmp_path: Path, checkpoint: Path) -> None:
    async with running(tmp_path, checkpoint) as world:
        for site in "aab":
            assert await world.post(site, prompt=list(range(100))) == 200
        computed = {s: world.metric("tokens_total", site=s, kind="computed") for s in "ab"}
    bill = make_bill(logs_in_folders([tmp_path / "audit"]), Period())
    billed = {key.tenant: row.amounts.tokens for key, row in bill.rows.items()}
    assert billed == computed


@pytest.mark.parametrize(
    ("orders", "can_wait"),
    [({}, False), ({"wait": {"wait_ms": 10}}, True), ({"wait_ms": 10}, True), ({"wait": 1}, False)],
)
def test_a_prefill_that_can_wait_is_known(orders: dict[str, Any], can_wait: bool) -> None:
    """In both places where an engine takes an order to wait."""
    body = BODY | {"kv_transfer_params": {"prfaas": orders}}
    assert read_prefill(json.dumps(body).encode()).can_wait == can_wait


async def test_a_site_does_not_pay_for_an_engine_that_is_not_there(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with running(tmp_path, checkpoint, behind=f"http://127.0.0.1:{free_port()}") as world:
        assert await world.post("a") == 502
        assert world.metric("tokens_total", site="a", kind="computed") == 0
        assert world.proxy._turns.queue.charged("a") == 0
        assert world.proxy._turns.queue._sites["a"].start == 0
