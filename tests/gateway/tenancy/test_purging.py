"""A purge at the gateway: every pool node, every engine, in that order, and what is not done."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.control.changes import Loop
from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.errors import RequestError
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from prfaas.gateway.times import Times
from prfaas.purge.intents import Intents, Unfinished
from prfaas.purge.loop import TAKEN_AGAIN, TRIES_FREE, PurgeLoop
from prfaas.purge.targets import Target
from prfaas.wire.messages.gateway import Order
from tests.gateway.conftest import World, annexes_of, running, until
from tests.gateway.ctl_runner import run
from tests.gateway.prompts import LONG
from tests.gateway.purge_scripts import ENGINES, script
from tests.gateway.scripted_pool import ScriptedPool
from tests.orders import word


async def purge(world: World, **body: object) -> tuple[int, dict[str, Any]]:
    return await world.post({"source": "prfaas-pool", **body}, "/control/purge")


async def test_pools_drop_before_engines_forget_and_take_again_after(world: World) -> None:
    told = script(world)
    status, report = await purge(world)
    assert status == 200
    assert report["is_complete"]
    assert [pool["num_blocks"] for pool in report["pools"]] == [3, 3]
    assert {engine["name"]: engine["problem"] for engine in report["engines"]} == dict.fromkeys(
        ENGINES, ""
    )
    pools = ("prfaas-pool", "pd-pool")
    await until(lambda: len(told) == 7)
    assert set(told[:2]) == {(pool, "purge") for pool in pools}
    assert set(told[2:5]) == {(engine, "forget") for engine in ENGINES}
    assert set(told[5:]) == {(pool, "end") for pool in pools}
    [entry] = world.gateway.journal.latest(1)
    assert (entry.action, entry.what, entry.why) == (
        "purge",
        "source prfaas-pool",
        "as the operator asked",
    )
    assert (entry.numbers["blocks"], entry.numbers["engines"]) == (6, 3)
    assert await world.metric('prfaas_loop_actions_total{action="purge",loop="operator"}') == 1


async def test_a_dry_run_only_counts(world: World) -> None:
    told = script(world)
    _, report = await purge(world, dry_run=True)
    assert (report["dry_run"], report["engines"], report["decision"]) == (True, [], None)
    assert {what for _, what in told} == {"purge"}
    assert world.gateway.journal.latest(1) == []


@pytest.mark.parametrize("times", [Times(purge_retry_s=0.001)])
async def test_an_engine_that_can_not_forget_yet_gets_nothing_new_until_it_has(
    world: World,
) -> None:
    script(world)
    held: list[bool] = []

    def forget() -> bool:
        held.append(world.gateway.driver.states.is_barred("decode"))
        return len(held) > TRIES_FREE + 2

    world.decode.on_forget = forget
    _, report = await purge(world)
    assert report["is_complete"]
    assert held == [False] * (TRIES_FREE + 1) + [True] * 2
    assert not world.gateway.driver.is_drained("decode")


@pytest.mark.parametrize("times", [Times(purge_retry_s=0.001)])
async def test_what_is_not_done_is_named_and_asked_for_again(world: World) -> None:
    script(world)
    world.decode.on_forget = lambda: False
    world.spare.on_forget = None
    await world.prfaas_pool.stop()
    await until(lambda: not world.gateway.pools.is_live("prfaas-pool"))
    status, report = await purge(world)
    assert status == 200
    assert not report["is_complete"]
    problems = {part["name"]: part["problem"] for part in (*report["pools"], *report["engines"])}
    assert problems["prfaas-pool"] == "not connected"
    assert "blocks are being loaded" in problems["decode"]
    assert "--middleware" in problems["spare"]
    assert (problems["pd-pool"], problems["prefill"]) == ("", "")
    [entry] = world.gateway.journal.latest(1)
    assert "NOT DONE at prfaas-pool, decode, spare" in entry.why
    await world.prfaas_pool.start()
    await until(lambda: world.gateway.pools.is_live("prfaas-pool"))
    script(world)
    assert (await purge(world))[1]["is_complete"]


async def test_a_pool_that_breaks_in_the_middle_is_not_done(world: World) -> None:
    script(world)
    world.pd_pool.on_purge = lambda pool, _: pool.disconnect()
    _, report = await purge(world)
    problems = {pool["name"]: pool["problem"] for pool in report["pools"]}
    assert problems == {"prfaas-pool": "", "pd-pool": "the connection broke"}


async def test_a_pool_that_was_started_anew_before_engines_forgot_is_not_done(world: World) -> None:
    told = script(world)
    world.pd_pool.is_barred = False
    _, report = await purge(world)
    assert not report["is_complete"]
    problems = {pool["name"]: pool["problem"] for pool in report["pools"]}
    assert problems == {"prfaas-pool": "", "pd-pool": TAKEN_AGAIN}
    [entry] = world.gateway.journal.latest(1)
    assert "NOT DONE at pd-pool" in entry.why
    assert told.count(("pd-pool", "end")) == 1
    world.pd_pool.is_barred = True
    assert (await purge(world))[1]["is_complete"]


async def test_one_purge_at_a_time_and_it_outlives_who_asked(world: World) -> None:
    told = script(world)
    asked, go_on = asyncio.Event(), asyncio.Event()
    answer = world.pd_pool.on_purge
    assert answer is not None
    assert answer is not None

    def late(pool: ScriptedPool, message: Order) -> None:
        asked.set()
        waiting.append(asyncio.create_task(later(pool, message)))

    async def later(pool: ScriptedPool, message: Order) -> None:
        await go_on.wait()
        answer(pool, message)

    waiting: list[asyncio.Task[None]] = []
    world.pd_pool.on_purge = late
    first = asyncio.create_task(purge(world))
    await asked.wait()
    status, refused = await purge(world)
    assert status == 409
    assert "a purge is running" in refused["error"]["message"]
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    go_on.set()
    await until(lambda: ("pd-pool", "end") in told)
    assert ("decode", "forget") in told


async def test_of_two_purges_in_one_turn_of_the_loop_the_second_is_refused(world: World) -> None:
    script(world)
    purging = annexes_of(world).purging
    asked = [purging.purge("prfaas-pool", is_dry=False) for _ in range(2)]
    first, second = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, dict)
    assert isinstance(second, RequestError)
    assert second.status == 409


async def test_a_pool_that_nobody_knows_is_a_404_and_one_that_left_is_not(world: World) -> None:
    script(world, num_blocks=0)
    status, answer = await purge(world, source="prfaas-pol")
    assert status == 404
    assert "no pool 'prfaas-pol'" in answer["error"]["message"]
    script(world, num_blocks=2)
    assert (await purge(world, source="a-pool-that-left"))[0] == 200


async def test_ctl_purges_and_says_what_is_not_done(world: World) -> None:
    script(world)
    dry = await run("purge", "--source", "prfaas-pool", "--dry-run", url=world.url)
    assert dry.exit_code == 0
    assert "pd-pool  has 3 blocks of prfaas-pool: 300 bytes in memory, 20 on disk" in dry.output
    done = await run("purge", "--source", "prfaas-pool", url=world.url)
    assert done.exit_code == 0
    assert "engine     decode  forgot all it held" in done.output
    assert "nothing of prfaas-pool is left" in done.output
    world.spare.on_forget = None
    left = await run("purge", "--source", "prfaas-pool", "--json", url=world.url)
    assert left.exit_code == 1
    assert not json.loads(left.output)["is_complete"]
    left = await run("purge", "--source", "prfaas-pool", url=world.url)
    assert "engine     spare  NOT DONE: /reset_prefix_cache answers 404" in left.output
    last = (await run("decisions", "--limit", "1", url=world.url)).output
    assert "operator purge  source prfaas-pool" in last


# --- tenants, and purges that were interrupted ---


def targets(world: World) -> list[str]:
    return [str(target) for target in Intents(world.state, "gateway").pending()]


async def test_a_purge_of_a_tenant_names_its_tag_and_not_its_name(world: World) -> None:
    script(world)
    asked: list[Order] = []
    answer = world.pd_pool.on_purge
    assert answer is not None

    def note(pool: ScriptedPool, message: Order) -> None:
        asked.append(message)
        answer(pool, message)

    world.pd_pool.on_purge = note
    body = {"tenant": DEFAULT_NAME}
    status, report = await world.post(body, "/control/purge")
    assert (status, report["is_complete"], report["tenant"]) == (200, True, DEFAULT_NAME)
    await until(lambda: len(asked) == 2)
    tag = tenant_tag(world.salt)
    assert [word(message) for message in asked] == ["purge", "end"]
    for message in asked:
        assert (message.source, message.tenant) == ("", tag)
    [entry] = world.gateway.journal.latest(1)
    assert (entry.action, entry.what) == ("purge", f"tenant {DEFAULT_NAME}")
    assert targets(world) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"source": "prfaas-pool", "tenant": "default"}, 400),
        ({"tenant": "nobody"}, 404),
    ],
)
async def test_a_purge_of_neither_both_or_an_unknown_tenant_is_refused(
    world: World, body: dict[str, str], status: int
) -> None:
    script(world, num_blocks=0)
    assert (await world.post(body, "/control/purge"))[0] == status
    assert targets(world) == []


@pytest.mark.parametrize("times", [Times(purge_repeat_s=0.01)])
async def test_a_purge_that_was_not_done_is_repeated_until_it_is(world: World) -> None:
    told = script(world, problem="the disk is away")
    _, report = await world.post({"tenant": DEFAULT_NAME}, "/control/purge")
    assert not report["is_complete"]
    assert targets(world) == [f"tenant {DEFAULT_NAME}"]
    seen = len(told)
    script(world)
    await until(lambda: not targets(world))
    assert len(told) == seen, "the others answer now"


async def test_a_pool_that_leaves_while_engines_are_reset_is_named(world: World) -> None:
    script(world)
    pools = world.gateway.pools

    def leaves() -> bool:
        pools._clients.pop("pd-pool", None)
        return True

    client = pools._clients["pd-pool"]
    world.decode.on_forget = leaves
    try:
        report = await annexes_of(world).purging.purge("prfaas-pool", is_dry=False)
    finally:
        pools._clients["pd-pool"] = client
    problems = {pool["name"]: pool["problem"] for pool in report["pools"]}
    assert problems == {"prfaas-pool": "", "pd-pool": "at its end: it has left the deployment"}


@pytest.mark.parametrize("times", [Times(purge_repeat_s=0.01)])
async def test_a_repeat_that_fails_is_logged_and_others_follow(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    script(world)
    purging, failed = annexes_of(world).purging, asyncio.Event()

    async def fails(*_: object, **__: object) -> None:
        failed.set()
        raise RuntimeError("made up")

    vars(purging)["_run"] = fails
    Intents(world.state, "gateway").begin(Target("prfaas-pool"))
    await failed.wait()
    del vars(purging)["_run"]
    await until(lambda: not targets(world))
    assert "purge_repeat_failed" in caplog.text


@pytest.mark.parametrize("times", [Times(purge_repeat_s=0.01)])
async def test_engines_are_reset_again_only_where_a_part_failed_that_can_be_reached(
    world: World,
) -> None:
    script(world)
    await world.prfaas_pool.stop()
    await until(lambda: not world.gateway.pools.is_live("prfaas-pool"))
    _, report = await world.post({"tenant": DEFAULT_NAME}, "/control/purge")
    assert not report["is_complete"]
    told = script(world)
    purging, target = annexes_of(world).purging, Intents(world.state, "gateway").pending()[0]
    assert purging._due(target) == frozenset(), "nothing that failed can be reached"
    await world.prfaas_pool.start()
    await until(lambda: not targets(world))
    clusters = purging._live.deployment.clusters.values()
    [beside] = [set(table.engines) for table in clusters if "prfaas-pool" in table.pools]
    assert {name for name, what in told if what == "forget"} == beside != set(ENGINES)
    assert ("pd-pool", "purge") not in told


async def test_an_engine_that_can_never_be_reset_is_named_and_keeps_no_intent(world: World) -> None:
    script(world)
    world.spare.on_forget = None
    status, report = await world.post({"tenant": DEFAULT_NAME}, "/control/purge")
    assert (status, report["is_complete"]) == (200, False)
    assert [each["name"] for each in report["engines"] if each["problem"]] == ["spare"]
    assert targets(world) == []


def test_before_its_first_attempt_a_purge_waits_for_all_pools_and_then_for_what_failed() -> None:
    unfinished, target = Unfinished(), Target("a")
    clusters = [(["a", "a2"], ["e"]), (["b"], ["f", "g"])]

    def due(*reachable: str) -> set[str]:
        return set(unfinished.due(target, reachable, ["a", "a2", "b"], clusters))

    assert due("a", "b", "e") == set()
    assert due("a", "a2", "b", "e") == {"a", "a2", "b", "e", "f", "g"}
    assert not unfinished.note(target, None, ["a", "f"])
    assert due("a2", "b", "e", "g") == set()
    assert due("a", "b", "e", "g") == {"a", "e"}
    assert not unfinished.note(target, {"a", "e"}, [])
    assert due("a", "f") == {"b", "f"}
    assert unfinished.note(target, {"b", "f"}, [])


async def test_blocks_of_a_removed_tenant_may_be_at_a_pool_that_is_not_connected(
    world: World,
) -> None:
    script(world, num_blocks=0)
    await world.prfaas_pool.stop()
    await until(lambda: not world.gateway.pools.is_live("prfaas-pool"))
    status, report = await world.post({"tenant": "removed"}, "/control/purge")
    assert (status, report["is_complete"]) == (200, False)
    assert targets(world) == ["tenant removed"]


class Died(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("step", ["before any pool", "before any engine", "before the end"])
async def test_a_gateway_that_died_in_a_purge_ends_it_after_its_next_start(
    world: World, step: str
) -> None:
    told = script(world)
    purging = annexes_of(world).purging
    name = {"before any pool": "_at_pools", "before any engine": "_forget"}.get(step, "_end_at")

    async def dies(*_: object, **__: object) -> None:
        raise Died

    vars(purging)[name] = dies
    target = Target(tenant=DEFAULT_NAME, tag=tenant_tag(world.salt))
    assert await _run_of(purging, target) == "died"
    del vars(purging)[name]
    assert targets(world) == [f"tenant {DEFAULT_NAME}"]
    told.clear()
    again = asyncio.create_task(purging.repeat())
    await until(lambda: not targets(world))
    again.cancel()
    assert [told.count((pool, "purge")) for pool in ("prfaas-pool", "pd-pool")] == [1, 1]
    assert {(engine, "forget") for engine in ENGINES} <= set(told)


async def _run_of(purging: PurgeLoop, target: Target) -> str:
    try:
        await purging._run(target, Loop.OPERATOR, is_dry=False)
    except (Died, BaseExceptionGroup):
        return "died"
    return "done"


def test_an_intent_is_whole_or_not_there_and_damage_is_no_purge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    intents, target = Intents(tmp_path, "gateway"), Target(tenant="a", tag="f" * 32)
    assert intents.pending() == []
    intents.begin(target)
    intents.begin(target)
    assert intents.pending() == [target]
    assert Intents(tmp_path, "gateway-2").pending() == []
    (tmp_path / "purges" / "gateway.0.json").write_bytes(b"{")
    assert intents.pending() == [target]
    assert "purge_unreadable" in caplog.text
    intents.end(target)
    intents.end(target)
    assert intents.pending() == []


async def asked(world: World, request_id: str = "mine-1234") -> None:
    """A request whose prompt has names."""
    body, headers = {"model": "tiny", "prompt": LONG}, {"X-Request-Id": request_id}
    url = f"{world.url}/v1/completions"
    async with world.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200


async def test_a_purge_of_a_prompt_names_its_blocks_to_all_pools(world: World) -> None:
    told = script(world)
    named: list[Order] = []
    for pool in (world.prfaas_pool, world.pd_pool):
        answer = pool.on_purge

        def note(pool: ScriptedPool, message: Order, answer: Any = answer) -> None:
            named.append(message)
            answer(pool, message)

        pool.on_purge = note
    await asked(world)
    status, report = await world.post({"prefix_of": "mine-123"}, "/control/purge")
    assert (status, report["is_complete"], report["request"]) == (200, True, "mine-1234")
    assert {engine["problem"] for engine in report["engines"]} == {""}
    await until(lambda: len(told) == 7)
    assert {message.hashes for message in named} == {named[0].hashes}
    hashes = named[0].hashes
    assert hashes
    assert len(hashes) % 32 == 0
    assert {message.tenant for message in named} == {world.gateway.tenants.tag_of(DEFAULT_NAME)}
    assert [word(message) for message in named] == ["purge", "purge", "end", "end"]
    assert world.gateway.journal.latest(1)[0].what == "prompt of request mine-1234"


async def test_ctl_counts_the_blocks_of_a_prompt_before_it_drops_them(world: World) -> None:
    script(world)
    await asked(world)
    done = await run("purge", "--prefix-of", "mine-1234", url=world.url)
    assert done.exit_code == 0
    has, dropped = "has 3 blocks of the prompt of mine-1234", "dropped 3 blocks of the prompt"
    assert done.output.index(has) < done.output.index(dropped)
    unknown = await run("purge", "--prefix-of", "nobody-knows-it", url=world.url)
    assert unknown.exit_code != 0
    assert "no such request among the 1 whose names" in str(unknown.exception)


async def test_without_names_a_purge_of_a_prompt_is_refused(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    tables = {"gateway": {"request_names": "0B"}}
    async with running(checkpoint, identities, tmp_path / "state", **tables) as world:
        await asked(world)
        status, found = await world.post({"prefix_of": "mine-1234"}, "/control/purge")
        assert status == 404
        assert "gateway.request_names" in found["error"]["message"]
