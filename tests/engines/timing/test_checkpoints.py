"""Broken transfers of a hybrid model: decode resumes at the last checkpoint that came whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.events import BlockKept, TransferInput
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from tests.engines.timing.pulled_prefixes import PROMPT as PULLED
from tests.engines.timing.pulled_prefixes import pulling
from tests.lab.faults import Fault
from tests.pool.sites import until

from .deployment import World, alone, running
from .worlds import PLAN, SPAN, write_plan

pytestmark = pytest.mark.timeout(120)
PLAN_OF_LARGE_BLOCKS = PLAN.replace("64B", "4KiB")
STATE_BYTES = 4096
PROMPT = [number % 300 for number in range(657)]
"""Its blocks reach to 656 tokens; an engine keeps a state every 64, where its steps end."""
FINAL = 656
WIRE_BITS_PER_S = 32_000_000
"""A block of attention takes a slow reader some 16 ms."""


class Arrivals:
    """Blocks of transfers that the receiving pool node accepted, in their order.

    Its store also gets what the engine computes afterwards.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[BlockKey] = []
        inbound = world.sites["pd-pool"].node.inbound
        report = inbound.report

        def reported(event: TransferInput) -> bool:
            if isinstance(event, BlockKept) and event.failure is None:
                self.keys.append(event.name[1])
            return report(event)

        monkeypatch.setattr(inbound, "report", reported)

    def number(self, group: int) -> int:
        return sum(key.group == group for key in self.keys)


def listed(world: World) -> dict[int, list[bytes]]:
    """Blocks that the ticket of the open transfer names, by cache group."""
    [link] = world.sites["prfaas-pool"].node.links.values()
    [outgoing] = link.machine.open.values()
    return {
        group: [names[at : at + 32] for at in range(0, len(names), 32)]
        for group, names in outgoing.named.manifest.items()
    }


def resumable(keys: list[BlockKey], names: dict[int, list[bytes]]) -> int:
    """The longest prefix of which every block of attention and the state at its end are there."""
    have = set(keys)
    run = 0
    while run < len(names[0]) and BlockKey(0, names[0][run]) in have:
        run += 1
    # The list of states ends at the same token as that of attention.
    first = len(names[0]) - len(names[1])
    ends = [
        index + 1 for index in range(first, run) if BlockKey(1, names[1][index - first]) in have
    ]
    return max(ends, default=0) * SPAN


async def cut(
    world: World, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch, usable_min: int
) -> tuple[dict[str, Any], int]:
    """Ask, and cut the link once 60 % of the attention is there, and a checkpoint behind its own.

    Returns:
        The answer, and the tokens that are usable.
    """
    local = world.sites["pd-pool"].node
    monkeypatch.setattr(local.inbound.machine, "grace_ns", 0)
    world.wire.read_bits_per_s = WIRE_BITS_PER_S
    asked = asyncio.create_task(world.complete(PROMPT))
    await until(lambda: arrivals.number(0) > 0)
    names = listed(world)
    await until(lambda: arrivals.number(0) >= FINAL // SPAN * 6 // 10)
    await until(lambda: resumable(arrivals.keys, names) >= usable_min)
    world.wire.is_plugged = False
    world.wire.strike(Fault.RESET)
    reply = await asked
    return reply, resumable(arrivals.keys, names)


@pytest.mark.parametrize("spacing", [0, 64, 128, 300])
async def test_a_cut_transfer_is_resumed_at_the_last_whole_checkpoint(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spacing: int,
) -> None:
    right = await alone(checkpoint, tmp_path, PROMPT)
    routing = {"offload_threshold": 200, "state_checkpoints": spacing}
    async with running(
        tmp_path,
        checkpoint,
        identities,
        has_wire=True,
        plan_text=PLAN_OF_LARGE_BLOCKS,
        routing=routing,
    ) as world:
        arrivals = Arrivals(world, monkeypatch)
        # Steps end every 64 tokens: the next of them after each spacing.
        step = -(-spacing // 64) * 64
        reply, usable = await cut(world, arrivals, monkeypatch, usable_min=step)
        record = await world.record()
        assert record["fallback"] == {"stage": "transfer", "reason": "link_lost"}
        assert reply["choices"][0]["text"] == right
        decode = world.instance(record["decode_engine"]).counts
        assert decode.external_hit_tokens == usable
        if spacing:
            assert usable % step == 0
            assert 0 < usable // step <= arrivals.number(1) <= 10
        else:
            assert (usable, arrivals.number(1)) == (0, 0)


@pytest.mark.parametrize(
    ("setting", "num_extra"),
    [
        ({}, 0),
        ({"state_checkpoints": 0}, 0),
        ({"state_checkpoints": 128}, 5),
        # Ten states would more than double the bytes, and steps end every 64 tokens.
        ({"state_checkpoints": 1}, 10),
        # A tenth of the bytes is one state.
        ({"state_checkpoints": "auto"}, 1),
    ],
)
async def test_checkpoints_are_counted_as_bytes_of_the_transfer(
    checkpoint: Path,
    identities: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: dict[str, int | str],
    num_extra: int,
) -> None:
    """With a plan, and none that nobody has asked for."""
    routing = {
        "offload_threshold": 200,
        "policy": "paper",
        "plan": str(write_plan(tmp_path)),
        **setting,
    }
    async with running(tmp_path, checkpoint, identities, routing=routing) as world:
        arrivals = Arrivals(world, monkeypatch)
        await world.complete(PROMPT)
        record = await world.record()
        assert (record["path"], record["fallback"]) == ("remote", None)
        assert arrivals.number(1) == 1 + num_extra
        assert record["kv_bytes"] == FINAL * 64 + (1 + num_extra) * STATE_BYTES
        source = world.sites["prfaas-pool"]
        sent = source.metric("pool_checkpoint_bytes_total", peer="pd-pool", outcome="sent")
        assert sent == num_extra * STATE_BYTES
        assert signed_bytes(world) == record["kv_bytes"]


async def test_a_pull_is_not_charged_for_checkpoints(
    checkpoint: Path, identities: Path, tmp_path: Path
) -> None:
    """It ships the last state alone."""
    async with pulling(checkpoint, identities, tmp_path, state_checkpoints=SPAN) as world:
        await world.complete(PULLED)
        record = await world.record()
        assert record["pulled_tokens"] == 176
        assert signed_bytes(world) == record["kv_bytes"] == 176 * 64 + STATE_BYTES


def signed_bytes(world: World) -> float:
    name, labels = "prfaas_tenant_link_bytes_total", {"tenant": DEFAULT_NAME}
    return world.gateway.metrics.registry.get_sample_value(name, labels) or 0
