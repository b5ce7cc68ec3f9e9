"""A small drill in every run of the tests; `python -m tests.drill` is the large one."""

import asyncio
from pathlib import Path

import pytest

from prfaas.core.codec.codecs import LinkCodec, Quality
from prfaas.core.transfer.link_encryption import LinkEncryption

from .audit import audited, unbilled
from .drill import AUDIT, Drill, Kind, Protocol, run

LOSSLESS_RATIO = 1.34
"""Bytes of blocks for a byte on the link, more than any coding without loss has."""


@pytest.mark.timeout(240)
async def test_every_kind_of_fault_twice(tmp_path: Path) -> None:
    rounds = await run(tmp_path, 2 * len(Kind), seed=3)
    assert {one.kind: one.problems for one in rounds if one.problems} == {}
    survived = [one for one in rounds if one.kind in {Kind.CUT, Kind.RESET, Kind.CORRUPT}]
    assert sum(one.num_served for one in survived) > sum(one.num_blocks for one in survived) / 2


@pytest.mark.timeout(240)
@pytest.mark.parametrize("encryption", [LinkEncryption.SEALED, LinkEncryption.NETWORK])
async def test_coded_blocks_survive_faults_without_tls(
    tmp_path: Path, encryption: LinkEncryption
) -> None:
    """A path that damages records, connections that are cut, and a forger with an identity."""
    kinds = [Kind.CORRUPT, Kind.CUT, Kind.FORGE, Kind.RESET, Kind.KILL_SOURCE, Kind.CORRUPT]
    async with Drill.at(tmp_path, 7, Protocol(LinkCodec.ALWAYS, encryption)) as drill:
        for kind in kinds:
            await drill.ready()
            assert (await drill.strike(kind)).problems == []
        node = await drill.nodes["pd-pool"].metrics()

    coded_s = node["prfaas_codec_seconds_total"]
    assert coded_s > 0


@pytest.mark.timeout(240)
async def test_rounded_blocks_survive_faults_on_several_lanes(tmp_path: Path) -> None:
    """The attention of these blocks is exact in fp8: a byte that differs is a fault."""
    kinds = [Kind.CORRUPT, Kind.CUT, Kind.RESET, Kind.FORGE, Kind.CUT, Kind.CORRUPT]
    protocol = Protocol(LinkCodec.ALWAYS, LinkEncryption.SEALED, 4, Quality.FP8)
    async with Drill.at(tmp_path, 13, protocol) as drill:
        await drill.ready()
        for node in drill.nodes.values():
            while not (await node.metrics())["prfaas_codec_bytes_per_second"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for kind in kinds:
            await drill.ready()
            assert (await drill.strike(kind)).problems == []
        moved = await drill.nodes["prfaas-pool"].metrics()

    ratio = moved["prfaas_link_bytes_total"] / moved["prfaas_link_wire_bytes_total"]
    assert ratio > LOSSLESS_RATIO


@pytest.mark.timeout(240)
async def test_audit_logs_are_the_counters_to_the_byte_after_faults(tmp_path: Path) -> None:
    """No process is killed, so that the counters are those of all faults together."""
    kinds = [Kind.CUT, Kind.RESET, Kind.CORRUPT, Kind.FORGE, Kind.HALF_OPEN]
    async with Drill.at(tmp_path, seed=5) as drill:
        for kind in kinds:
            await drill.ready()
            assert (await drill.strike(kind)).problems == []
        moved = (await drill.nodes["pd-pool"].metrics())["prfaas_link_wire_bytes_total"]
        problems = await audited(drill.nodes, tmp_path / AUDIT)

    assert problems == []
    assert moved > 0


@pytest.mark.timeout(240)
async def test_the_bill_has_every_byte_of_the_logs_after_cut_links_and_killed_pools(
    tmp_path: Path,
) -> None:
    """A restarted process counts from 0, so its counters are compared since its last start."""
    kinds = [Kind.CUT, Kind.KILL_SOURCE, Kind.RESET, Kind.KILL_DESTINATION, Kind.CORRUPT]
    async with Drill.at(tmp_path, seed=11) as drill:
        for kind in kinds:
            await drill.ready()
            assert (await drill.strike(kind)).problems == []
        problems = await audited(drill.nodes, tmp_path / AUDIT)
        problems += unbilled(tmp_path / AUDIT)

    assert problems == []
