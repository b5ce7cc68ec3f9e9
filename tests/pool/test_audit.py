"""The audit log of pool nodes: what moved, by whose permission, to the byte."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prfaas.audit.reading import logs_of, records, verify
from prfaas.audit.settings import AuditSettings, OnFull
from prfaas.billing.report import Period, logs_in_folders, make_bill
from prfaas.core.kv.blocks import BlockKey
from prfaas.core.transfer.transfer_state import TransferEnd
from tests.lab.faults import Fault, FaultProxy
from tests.orders import purge as order_purge

from .conftest import World
from .link_rig import BLOCK_BYTES, MEMORY, Rig
from .sites import Site, content, subscribe, until

GRACE_NS = 6 * 10**9
CANARY = BlockKey(0, b"\x07" * 32)


@dataclass
class Audited:
    """Two linked pool nodes with audit logs in one folder."""

    rig: Rig
    folder: Path

    @property
    def sites(self) -> dict[str, Site]:
        return {"prfaas-pool": self.rig.prfaas, "pd-pool": self.rig.pd}

    def records(self, pool: str, kind: str) -> list[dict[str, Any]]:
        lines = records(logs_of(self.folder)[pool])
        return [line.fields for line in lines if line.kind == kind]

    def content(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.folder.glob("*.jsonl"))

    async def stop(self) -> None:
        """End both in order, and see that their logs are whole."""
        for site in self.sites.values():
            await site.kill()
        for pool, files in logs_of(self.folder).items():
            report = verify(self.folder, pool, files)
            assert report.is_intact, report.findings
            assert report.unsigned_lines == 0


@pytest.fixture
async def audited(world: World, identities: Path, tmp_path: Path) -> AsyncIterator[Audited]:
    folder = tmp_path / "audit"
    audit = AuditSettings(folder, folder)
    pd = await world.start("pd-pool", memory_bytes=MEMORY, link_grace_ns=GRACE_NS, audit=audit)
    proxy = FaultProxy(("127.0.0.1", pd.port))
    await proxy.open()
    prfaas = await world.start(
        "prfaas-pool",
        memory_bytes=MEMORY,
        link_grace_ns=GRACE_NS,
        link_connections={"pd-pool": 2},
        peers={"pd-pool": ("127.0.0.1", proxy.port)},
        audit=audit,
    )
    rig = Rig(proxy, prfaas, pd, identities)
    await until(lambda: rig.link.telemetry.num_connections == 2)
    yield Audited(rig, folder)
    await proxy.close()


def ended(site: Site, direction: str) -> float:
    states = ("committed", "aborted", "refused", "expired")
    return sum(site.metric("transfers_total", direction=direction, state=s) for s in states)


def all_ended(site: Site, count: int) -> bool:
    return ended(site, "sent") == count


def passed(proxy: FaultProxy, num_bytes: int) -> bool:
    return proxy.num_bytes > num_bytes


async def test_bytes_in_the_logs_of_both_sites_are_those_of_the_counters_over_faults(
    audited: Audited,
) -> None:
    rig = audited.rig
    rig.proxy.read_bits_per_s = 200_000_000
    faults = [None, Fault.CUT, Fault.RESET, Fault.CORRUPT, None, Fault.RESET]
    for number, fault in enumerate(faults):
        transfer, before = rig.begin(), rig.proxy.num_bytes
        rig.push(transfer, 12)
        if fault is not None:
            await until(partial(passed, rig.proxy, before + BLOCK_BYTES))
            rig.proxy.strike(fault)
        if number == 4:
            rig.link.abort(transfer, TransferEnd.ABORTED)
        else:
            rig.link.finish(transfer)
        await until(partial(all_ended, rig.prfaas, number + 1))
        await until(lambda: not rig.pd.node.inbound.known.num_open)
    await audited.stop()

    for pool, peer, direction in (
        ("prfaas-pool", "pd-pool", "sent"),
        ("pd-pool", "prfaas-pool", "received"),
    ):
        moved = audited.records(pool, "movement")
        labels = {"peer": peer, "direction": direction}
        for name in ("link_bytes", "wire_bytes"):
            metric = "link_bytes_total" if name == "link_bytes" else "link_wire_bytes_total"
            counted = audited.sites[pool].metric(metric, **labels)
            assert sum(record[name] for record in moved) == counted > 0, (pool, name)
    bill = make_bill(logs_in_folders([audited.folder]), Period()).total().amounts
    for name, pool, peer in (
        ("sent", "prfaas-pool", "pd-pool"),
        ("received", "pd-pool", "prfaas-pool"),
    ):
        labels = {"peer": peer, "direction": name}
        site = audited.sites[pool]
        assert getattr(bill, f"{name}_bytes") == site.metric("link_bytes_total", **labels)
        assert getattr(bill, f"{name}_wire_bytes") == site.metric("link_wire_bytes_total", **labels)
    held_s = sum(
        site.metric("usage_storage_byte_seconds_total", tier="host")
        for site in audited.sites.values()
    )
    assert bill.byte_ns > 0
    assert bill.byte_ns / 1e9 == pytest.approx(held_s, rel=1e-9)
    sent = audited.sites["prfaas-pool"].metric("link_bytes_total", peer="pd-pool", direction="sent")
    assert sent > len(faults) * 11 * BLOCK_BYTES, "nothing was sent again"


async def test_a_movement_has_who_asked_and_what_moved_at_both_ends(audited: Audited) -> None:
    rig = audited.rig
    transfer = rig.begin()
    rig.push(transfer, 3)
    rig.link.finish(transfer)
    await until(lambda: ended(rig.pd, "received") and ended(rig.prfaas, "sent"))
    await audited.stop()

    for pool, direction in (("prfaas-pool", "sent"), ("pd-pool", "received")):
        (granted,) = audited.records(pool, "granted")
        (moved,) = audited.records(pool, "movement")
        facts = {
            "direction": direction,
            "transfer": transfer.hex(),
            "gateway": "gateway",
            "tenant": "a-tenant",
            "from": "prfaas-pool",
            "to": "pd-pool",
        }
        assert facts.items() <= granted.items()
        assert facts.items() <= moved.items()
        assert (moved["outcome"], moved["blocks"]) == ("committed", 3)
        assert moved["bytes"] == moved["link_bytes"] == moved["wire_bytes"] == 3 * BLOCK_BYTES
        assert granted["bytes_max"] == MEMORY // 2


async def test_refusals_and_purges_are_recorded(audited: Audited, world: World) -> None:
    rig = audited.rig
    engine = await world.engine("prfaas-pool")
    engine.push(signer="prfaas-pool")
    await until(lambda: ended(rig.prfaas, "sent"))
    gateway = await subscribe(rig.pd, world.identities)
    gateway.channel.send(order_purge(job=1, source="prfaas-pool", is_dry=False))
    await until(lambda: audited.records("pd-pool", "purge"))
    await audited.stop()

    (refusal,) = audited.records("prfaas-pool", "refusal")
    (purge,) = audited.records("pd-pool", "purge")
    assert (refusal["end"], refusal["reason"]) == ("source", "unknown_signer")
    assert (purge["gateway"], purge["from"], purge["outcome"]) == (
        "gateway",
        "prfaas-pool",
        "complete",
    )


async def test_many_refusals_are_a_few_records_and_a_count(audited: Audited, world: World) -> None:
    engine = await world.engine("prfaas-pool")
    for _ in range(50):
        engine.push(signer="prfaas-pool")
    await until(lambda: ended(audited.rig.prfaas, "sent") == 50)
    await audited.stop()

    refusals = audited.records("prfaas-pool", "refusal")
    assert len(refusals) < 50
    assert sum(record.get("count", 1) for record in refusals) == 50


async def test_a_log_that_cannot_be_written_closes_the_pool_only_if_it_is_told_to(
    world: World, tmp_path: Path
) -> None:
    """Writing fails from the first record on, as on a full disk."""
    for on_full, expected in ((OnFull.CLOSED, "not_audited"), (OnFull.OPEN, None)):
        folder = tmp_path / on_full.value
        settings = AuditSettings(folder, folder, on_full=on_full)
        site = await world.start("prfaas-pool", audit=settings, admin=("127.0.0.1", 0))
        assert site.process.audit is not None
        log = site.process.audit.log
        os.close(log._file._descriptor)
        log._file._descriptor = os.open("/dev/full", os.O_WRONLY)
        engine = await world.engine("prfaas-pool")
        engine.push(signer="prfaas-pool")
        await until(partial(site.metric, "pool_audit_failing"))
        engine.push()
        await until(partial(all_ended, site, 2))
        refused = site.metric("tickets_refused_total", end="source", reason="not_audited")
        assert refused == (1 if expected else 0)
        await site.kill()
        assert site.metric("pool_audit_lost_records_total") > 0


async def test_no_content_and_no_secret_is_in_a_log(
    world: World, audited: Audited, identities: Path
) -> None:
    rig = audited.rig
    engine = await world.engine("prfaas-pool")
    await engine.store([CANARY])
    pushed = engine.push()
    engine.push_done(pushed, rest=[CANARY])
    await until(lambda: ended(rig.pd, "received"))
    await audited.stop()
    log = audited.content()

    for secret in (content(CANARY), CANARY.block_hash):
        assert secret not in log
        assert secret.hex().encode() not in log
    private = (audited.folder / "pd-pool.key").read_text().splitlines()[1]
    assert private.encode() not in log
    assert (identities / "pd-pool.key").read_text().splitlines()[1].encode() not in log
