"""Pulls of which only a part comes: what did is used, and the rest is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prfaas.pool.send.outbound_link import OutboundLink
from prfaas.wire.messages.fields import keys_of
from prfaas.wire.messages.link import Pull
from tests.lab.faults import Fault
from tests.pool.sites import until

from .deployment import World, alone
from .pulled_prefixes import PROMPT, SPLIT, check_nothing_is_held, outcomes, pulling
from .worlds import DENSE_PLAN, SPAN

pytestmark = pytest.mark.timeout(120)
NUM_BLOCKS = 11
"""Blocks of attention of what is pulled."""
TAIL, HOLE = list(range(6, NUM_BLOCKS)), [6]
"""What the source has no more of it: all from the seventh block on, or that one alone."""
LARGE_PLAN = DENSE_PLAN.replace("64B", "8KiB")
LARGE_BLOCK_BYTES = SPAN * 8192
WIRE_BITS_PER_S = 64_000_000
"""A block of that plan takes a slow reader some 16 ms."""


def pulls_served(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: Sequence[int] = ()
) -> list[Pull]:
    """The pulls that come to the source, which drops these of their blocks just before.

    The gateway decides by what it has heard, and hears of that too late.
    """
    node, came = world.sites["prfaas-pool"].node, list[Pull]()
    serve, layout_id = node.link_room.sending.serve, world.instance("prfaas-0").layout.layout_id

    def served(link: OutboundLink, pull: Pull) -> None:
        came.append(pull)
        keys = keys_of(pull.keys)
        for index in lost:
            node.store.discard(layout_id, keys[index])
        serve(link, pull)

    monkeypatch.setattr(node.link_room.sending, "serve", served)
    return came


async def check_answer(
    world: World, reply: dict[str, Any], right: str, num_used: int, reason: str
) -> dict[str, Any]:
    """The answer is right, and so much of the pull was used. The gateway's record."""
    record = await world.record()
    assert (record["path"], record["outcome"]) == ("local", "finished")
    assert record["fallback"] == {"stage": "pull", "reason": reason}
    assert (record["pull_tokens"], record["pulled_tokens"]) == (176, num_used)
    assert reply["choices"][0]["text"] == right
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == num_used
    prefills = world.instance(record["prefill_engine"] or record["decode_engine"]).counts
    assert (prefills.external_hit_tokens, prefills.prompt_tokens) == (num_used, len(PROMPT))
    assert await outcomes(world) == {reason: 1}
    return record


async def check_let_go(world: World) -> None:
    """Nothing is held of it any more."""
    nodes = [site.node for site in world.sites.values()]
    await until(world.is_quiet)
    await until(lambda: all(node.store.room.loose_bytes == 0 for node in nodes))
    check_nothing_is_held(world)
    for node in nodes:
        assert (node.store.order.num_leased, node.inbound.known.promised_bytes) == (0, 0)


@pytest.mark.parametrize("roles", [{}, SPLIT], ids=["both", "split"])
@pytest.mark.parametrize("lost", [TAIL, HOLE], ids=["tail", "hole"])
async def test_the_source_has_evicted_some_of_it(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roles: dict[str, str],
    lost: list[int],
) -> None:
    right = await alone(checkpoint, tmp_path, PROMPT)
    async with pulling(checkpoint, identities, tmp_path, roles, DENSE_PLAN) as world:
        came = pulls_served(world, monkeypatch, lost)
        reply = await world.complete(PROMPT)
        record = await check_answer(world, reply, right, 6 * SPAN, "blocks_missing")
        assert record["transfer_state"] == "committed"
        assert record["kv_bytes"] == (NUM_BLOCKS - len(lost)) * SPAN * 64
        await check_let_go(world)
        # What was computed is at home as well.
        [pull] = came
        keys = keys_of(pull.keys)
        assert len(keys) == NUM_BLOCKS
        assert world.sites["pd-pool"].held() >= set(keys)


async def test_without_its_state_what_came_of_a_hybrid_model_is_of_no_use(
    checkpoint: Path, identities: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is pulled at the end of the prefix alone."""
    right = await alone(checkpoint, tmp_path, PROMPT)
    async with pulling(checkpoint, identities, tmp_path) as world:
        pulls_served(world, monkeypatch, [NUM_BLOCKS])
        reply = await world.complete(PROMPT)
        record = await check_answer(world, reply, right, 0, "blocks_missing")
        assert (record["transfer_state"], record["kv_bytes"]) == ("committed", 176 * 64)
        await check_let_go(world)


@pytest.mark.parametrize("reason", ["link_lost", "late"])
async def test_the_link_is_cut_halfway(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    """It is lost once pools have waited long enough for their link, or too late before that."""
    right = await alone(checkpoint, tmp_path, PROMPT)
    async with pulling(checkpoint, identities, tmp_path, plan_text=LARGE_PLAN) as world:
        came, local = pulls_served(world, monkeypatch), world.sites["pd-pool"].node
        monkeypatch.setattr(
            local.inbound.machine, "grace_ns", 0 if reason == "link_lost" else 10**12
        )
        world.wire.read_bits_per_s = WIRE_BITS_PER_S
        asked = asyncio.create_task(world.complete(PROMPT))
        await until(lambda: came)
        first = set(keys_of(came[0].keys)[:3])
        await until(lambda: first <= world.sites["pd-pool"].held())
        world.wire.is_plugged = False
        world.wire.strike(Fault.RESET)
        reply = await asked
        record = await world.record()
        num_used = record["pulled_tokens"]
        assert num_used % SPAN == 0
        assert 3 * SPAN <= num_used <= record["kv_bytes"] // LARGE_BLOCK_BYTES * SPAN < 176
        await check_answer(world, reply, right, num_used, reason)
        assert record["transfer_state"] == "aborted"
        await check_let_go(world)
