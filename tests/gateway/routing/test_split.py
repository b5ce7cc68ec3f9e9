"""PD engines that only prefill or only decode: who gets which leg, and how roles change."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prfaas.cli.parts.gateway_annexes import make_gateway
from prfaas.cli.parts.gateway_plan import load_profiles
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.core.control.role_loop import (
    STALE_NS,
    InstanceQueue,
    Role,
    RoleLoop,
    RoleSettings,
    SplitPlan,
)
from prfaas.core.control.roles import Roles
from prfaas.core.control.split import Split
from prfaas.core.control.threshold_loop import TrafficMix
from prfaas.core.dispatch.links import LinkReport
from prfaas.core.kv.prefix_index import PrefixIndex
from prfaas.errors import ConfigError
from prfaas.gateway.loops.loops import Reroling
from prfaas.gateway.routing.change_log import Journal
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.units import NS_PER_S
from tests.gateway.conftest import THRESHOLD, World, deployment_for, running, until
from tests.gateway.prompts import LONG, SHORT
from tests.gateway.scripted_engine import refuse
from tests.plans import plan_file

MEDIUM = "y" * 90
"""More than a block, less than the threshold."""
ROLES = {"decode": {"role": "decode"}, "spare": {"role": "prefill"}}


@asynccontextmanager
async def split(
    checkpoint: Path, identities: Path, directory: Path, **routing: Any
) -> AsyncIterator[World]:
    tables = {"engines": ROLES, "routing": routing}
    async with running(checkpoint, identities, directory / "state", **tables) as world:
        world.spare.healthy = True
        await until(lambda: world.gateway.engines.by_name["spare"].is_ready)
        yield world


async def sent(world: World, prompt: str) -> dict[str, Any]:
    status, _ = await world.post({"prompt": prompt, "max_tokens": 2})
    assert status == 200
    return await world.record()


async def test_one_prefills_and_hands_over_to_one_that_decodes(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with split(checkpoint, identities, tmp_path) as world:
        world.decode.cached_tokens = 64
        record = await sent(world, MEDIUM)
        [prefill], [decode] = world.spare.calls, world.decode.calls
        assert (record["path"], record["fallback"]) == ("local", None)
        assert (record["prefill_engine"], record["decode_engine"]) == ("spare", "decode")
        assert record["transfer_state"] is None
        assert await world.metric('prfaas_tenant_link_bytes_total{tenant="default"}') == 0
        order = prefill.body["kv_transfer_params"]["prfaas"]
        assert (prefill.body["max_tokens"], order["push_to"]) == (1, "pd-pool")
        assert "ticket" not in order
        awaited = decode.body["kv_transfer_params"]["prfaas"]
        assert (awaited["transfer"], awaited["source"]) == (order["transfer"], "pd-pool")
        # A prompt without a whole block leaves nothing to hand over.
        await sent(world, SHORT)
        assert (len(world.spare.calls), len(world.decode.calls)) == (1, 2)
        assert "kv_transfer_params" not in world.decode.calls[1].body
        # What is long is prefilled away, and decoded by an engine that decodes.
        world.decode.cached_tokens = 320
        record = await sent(world, LONG)
        assert (record["path"], record["prefill_engine"]) == ("remote", "prefill")
        assert record["decode_engine"] == "decode"
        assert len(world.spare.calls) == 1
        dispatcher = world.gateway.driver.dispatcher
        assert (len(dispatcher.requests), dispatcher.promised_bytes) == (0, 0)


async def test_what_an_engine_can_not_prefill_is_prefilled_where_it_is_decoded(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    async with split(checkpoint, identities, tmp_path) as world:
        world.spare.script = refuse(500)
        record = await sent(world, MEDIUM)
        assert record["fallback"] == {"stage": "prefill", "reason": "status_5xx"}
        assert "kv_transfer_params" not in world.decode.calls[0].body
        assert world.gateway.driver.dispatcher.load("spare").num_jobs("spare") == 0


@pytest.mark.parametrize("gone", ["spare", "decode"])
async def test_without_anybody_in_a_role_the_others_do_both(
    checkpoint: Path, identities: Path, tmp_path: Path, gone: str
) -> None:
    async with split(checkpoint, identities, tmp_path) as world:
        left = world.spare if gone == "decode" else world.decode
        (world.decode if gone == "decode" else world.spare).healthy = False
        await until(lambda: not world.gateway.engines.by_name[gone].is_ready)
        record = await sent(world, MEDIUM)
        assert (record["decode_engine"], len(left.calls)) == (left.name, 1)


async def test_the_roles_are_shown(checkpoint: Path, identities: Path, tmp_path: Path) -> None:
    plan = str(plan_file(tmp_path, instances=2))
    async with split(checkpoint, identities, tmp_path, plan=plan, reroling=True) as world:
        roles = {e["name"]: e["role"] for e in (await status(world))["engines"]}
        assert roles == {"decode": "decode", "spare": "prefill", "prefill": None}
        assert world.gateway.loops.reroling is not None


async def status(world: World) -> dict[str, Any]:
    async with world.http.get(f"{world.url}/control/status") as response:
        found: dict[str, Any] = await response.json()
        return found


@dataclass
class Stage:
    """A driver whose engines are all well, and its long-term loop, which does not hesitate."""

    deployment: Deployment
    driver: Driver
    split: Split
    journal: Journal
    loop: Reroling
    now_ns: int = 10**15

    def seen(self, **num_running: int) -> None:
        for name, number in num_running.items():
            self.split.loads.report(name, InstanceQueue(self.now_ns, number, 0))

    @property
    def newest(self) -> ChangeEntry:
        return self.journal.latest(1)[0]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    engines = {"decode": "decode", "spare": "prefill", "more": "decode"}
    deployment = deployment_for(
        tmp_path,
        tmp_path,
        tmp_path,
        engines={name: {"role": role} for name, role in engines.items()},
        routing={"plan": str(plan_file(tmp_path, instances=3)), "reroling": True},
    )
    profiles, journal = load_profiles(deployment), Journal()
    driver = Driver(deployment, profiles, PrefixIndex())
    assert driver.split is not None
    eager = RoleSettings(patience_ns=0, dwell_ns=0, smoothing_ns=0, conversion_ns=0)
    driver.split.roles = Roles([Role(role) for role in engines.values()], RoleLoop(100, eager))
    made = Stage(deployment, driver, driver.split, journal, Reroling(driver, driver.split, journal))
    for name in engines:
        driver.engine_ready(name, 4096, made.now_ns)
    return made


def press_prefill(stage: Stage) -> None:
    """Nobody decodes, and the engine that prefills has much to do."""
    stage.seen(decode=0, spare=1, more=1)
    for job in range(50):
        stage.driver.dispatcher.load("spare").dispatch("spare", job, stage.now_ns, 60 * NS_PER_S)


def test_a_pressed_stage_gets_an_engine_once_that_has_drained(stage: Stage) -> None:
    press_prefill(stage)
    stage.loop.turn(stage.now_ns)
    began, book = stage.newest, stage.driver.dispatcher.load("spare")
    assert (began.loop, began.action, began.what) == (Loop.ROLES, "drains", "engine decode")
    assert (began.old, began.new) == ("decode", "prefill")
    assert began.numbers["prefill_busy"] == 1
    assert "prefill is more pressed" in began.why
    # What it still has it finishes first, and takes nothing new.
    stage.seen(decode=1)
    stage.loop.beat(stage.now_ns + NS_PER_S)
    assert stage.split.is_changing("decode")
    assert dict(stage.split.ready())["decode:decode"] is False
    assert [name for name, _ in book.in_order(stage.now_ns)] == ["spare"]
    stage.seen(decode=0)
    stage.loop.beat(stage.now_ns + 2 * NS_PER_S)
    assert (stage.newest.action, stage.newest.numbers) == ("changed", {"drained_s": 2.0})
    assert stage.split.prefills("decode")
    assert [name for name, _ in book.in_order(stage.now_ns)] == ["decode", "spare"]


def test_an_engine_that_dies_while_it_drains_is_empty(stage: Stage) -> None:
    press_prefill(stage)
    stage.loop.turn(stage.now_ns)
    stage.seen(decode=9)
    stage.driver.engine_gone("decode", stage.now_ns)
    stage.loop.beat(stage.now_ns + NS_PER_S)
    assert stage.newest.action == "changed"
    assert [n for n, _ in stage.driver.dispatcher.load("spare").in_order(stage.now_ns)] == ["spare"]


def test_a_drain_that_does_not_end_is_given_up_and_another_engine_is_tried(stage: Stage) -> None:
    press_prefill(stage)
    stage.loop.turn(stage.now_ns)
    assert (stage.newest.action, stage.newest.what) == ("drains", "engine decode")
    late_ns = stage.now_ns + RoleSettings().drain_max_ns
    stage.seen(decode=3)
    stage.loop.beat(late_ns - 1)
    assert stage.split.is_changing("decode")
    stage.loop.beat(late_ns)
    assert (stage.newest.action, stage.newest.numbers) == ("kept", {"requests_left": 3})
    assert (stage.newest.old, stage.newest.new) == ("decode", "decode")
    assert dict(stage.split.ready())["decode:decode"] is True
    # The other one has more to do, and is tried nevertheless.
    stage.now_ns = late_ns
    stage.seen(decode=3, spare=1, more=9)
    stage.loop.turn(late_ns)
    assert (stage.newest.action, stage.newest.what) == ("drains", "engine more")


def test_queues_that_are_not_known_change_nothing(stage: Stage) -> None:
    press_prefill(stage)
    stage.loop.turn(stage.now_ns + STALE_NS + 1)
    assert stage.journal.latest(1) == []


def test_a_better_split_brings_its_threshold(stage: Stage) -> None:
    asked: list[tuple[int, float]] = []

    def plans(num_prefill: int, bits_per_s: float, _mix: TrafficMix | None) -> SplitPlan:
        asked.append((num_prefill, bits_per_s))
        return SplitPlan(offload_threshold=777, rate_per_s=float(num_prefill))

    stage.split._plans = plans
    loop = stage.loop
    dispatcher = stage.driver.dispatcher
    press_prefill(stage)
    loop.turn(stage.now_ns)
    assert not asked, "no link is up"
    dispatcher.set_link("prfaas-pool", "pd-pool", up=True)
    dispatcher.links.report("prfaas-pool", "pd-pool", LinkReport(stage.now_ns, 5e8, 0))
    stage.split.roles.convert(stage.now_ns)
    stage.split.roles.set_usable(0, usable=False)
    loop.turn(stage.now_ns)
    assert set(asked) == {(1, 5e8)}
    [replanned] = [e for e in stage.journal.latest(9) if e.action == "replanned"]
    assert (replanned.old, replanned.new) == (THRESHOLD, 777)
    assert dispatcher.links.between("prfaas-pool", "pd-pool").policy.offload_threshold == 777


def test_a_plan_of_another_size_is_refused(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    deployment = deployment_for(
        checkpoint,
        identities,
        tmp_path,
        engines=ROLES,
        routing={"plan": str(plan_file(tmp_path)), "reroling": True},
    )
    engines = dict.fromkeys(("prefill", "decode", "spare"), "http://127.0.0.1:1")
    pools = dict.fromkeys(("prfaas-pool", "pd-pool"), ("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="2 PD engines, and the plan has 1 PD instances"):
        make_gateway(deployment, Endpoints(engines, pools))
