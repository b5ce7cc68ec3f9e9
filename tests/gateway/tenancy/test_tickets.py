"""Tickets that the gateway signs, opened as a pool opens them."""

from __future__ import annotations

import base64
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.tenant_salts import tenant_tag
from prfaas.core.transfer.tickets import LIFETIME_MAX_NS, check_ticket
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from prfaas.wire.identity import make_authority, make_identity
from tests.gateway.conftest import LAYOUT, World, running, until
from tests.gateway.legs_tickets import ticket_of

LONG = "long prompt " * 30
S = 10**9


async def test_the_ticket_of_a_transfer_allows_just_that(world: World, identities: Path) -> None:
    before = time.time_ns()
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    order, ticket = ticket_of(world.prefill.calls[0], identities)
    check_ticket(
        ticket,
        transfer_id=bytes.fromhex(order["transfer"]),
        source="prfaas-pool",
        destination="pd-pool",
        now_ns=time.time_ns(),
    )
    assert ticket.layout_id == LAYOUT.layout_id
    # 320 of 360 tokens: 20 blocks of attention, one state.
    assert ticket.bytes_max == 20 * 1024 + 2048
    limits = 70 * S
    assert before + limits <= ticket.expires_at_ns <= time.time_ns() + limits


async def test_what_the_destination_has_is_not_in_the_budget(
    world: World, identities: Path
) -> None:
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    ids = world.decode.calls[-1].body["prompt"]
    world.pd_pool.store(LAYOUT, world.keys(ids, 192))
    index = world.gateway.index
    await until(lambda: index.usable_hit("pd-pool", LAYOUT, world.hashes(ids), len(ids)) == 192)
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    _, first = ticket_of(world.prefill.calls[0], identities)
    _, second = ticket_of(world.prefill.calls[1], identities)
    assert second.bytes_max == 8 * 1024 + 2048
    assert second.transfer_id != first.transfer_id


async def test_a_ticket_names_the_tenant_but_not_its_salt(world: World, identities: Path) -> None:
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    order, ticket = ticket_of(world.prefill.calls[0], identities)
    assert ticket.tenant == tenant_tag(world.salt) != tenant_tag(world.salt + "x")
    assert world.salt.encode() not in base64.b64decode(order["ticket"])


async def test_tickets_of_two_tenants_tell_them_apart_and_name_neither(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    keys = {name: new_key() for name in ("tenant-red", "tenant-blue")}
    tenants = {name: {"keys": [key_hash(key)]} for name, key in keys.items()}
    async with running(checkpoint, identities, tmp_path / "state", tenants=tenants) as world:
        for key in keys.values():
            asked = world.openai.with_options(api_key=key)
            await asked.completions.create(model="tiny", prompt=LONG, max_tokens=2)
        found = [ticket_of(call, identities) for call in world.prefill.calls]
    (red_order, red), (blue_order, blue) = found
    assert red.tenant != blue.tenant
    for order in (red_order, blue_order):
        sealed = base64.b64decode(order["ticket"])
        assert b"tenant-" not in sealed


async def test_no_ticket_is_valid_for_longer_than_pools_allow(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    slow = {"prefill_timeout": "5h", "transfer_timeout": "10s"}
    async with running(checkpoint, identities, tmp_path / "state", routing=slow) as world:
        await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
        _, ticket = ticket_of(world.prefill.calls[0], identities)
        assert ticket.expires_at_ns <= time.time_ns() + LIFETIME_MAX_NS


@pytest.mark.parametrize("where", ["prfaas_pool", "pd_pool"])
async def test_a_refused_ticket_is_a_fallback_of_its_own(world: World, where: str) -> None:
    async def refuse(engine: Any, request: Any, body: dict[str, Any]) -> Any:
        transfer = body["kv_transfer_params"]["prfaas"]["transfer"]
        pool = getattr(world, where)
        pool.end_transfer(transfer, kind="refused", reason="ticket refused (expired)")
        await engine.hanging.wait()
        raise AssertionError("the leg was not given up")

    world.prefill.script = refuse
    await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
    record = await world.record()
    assert record["fallback"] == {"stage": "transfer", "reason": "refused"}
    assert await world.metric('prfaas_fallback_total{reason="refused",stage="transfer"}') == 1


async def test_a_new_identity_signs_the_next_ticket(checkpoint: Path, tmp_path: Path) -> None:
    directories = tmp_path / "identities", tmp_path / "next"
    for directory in directories:
        make_authority(directory)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(directory, name)
    ours, following = directories
    async with running(checkpoint, ours, tmp_path / "state") as world:
        for file in ("ca.pem", "gateway.pem", "gateway.key"):
            shutil.copy(following / file, ours)
        world.gateway.renew_identity()
        await world.openai.completions.create(model="tiny", prompt=LONG, max_tokens=2)
        _, ticket = ticket_of(world.prefill.calls[0], following)
        assert ticket.destination == "pd-pool"
