"""The bill of a whole deployment under faults: gateway, pool nodes and timing engines as processes.

Bytes in the audit logs of both sites, the counters of the pool nodes and the bill are the same, and
so are the operations and tokens of the gateway's counters and the bill's.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from prfaas.audit.reading import logs_of, records, verify
from prfaas.billing.report import Period, logs_in_folders, make_bill
from prfaas.cli.deploy.topology import Topology, parts
from prfaas.cli.host.processes import ProcessPart
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.core.audit.records import RecordKind
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from prfaas.units import NS_PER_S
from tests.deployments import TIMING, laid_out, placed, put_between
from tests.lab.faults import Fault, FaultProxy

SOURCE, DESTINATION = "prfaas-pool", "pd-pool"
KEYS = {name: new_key() for name in ("red", "blue", "operator")}
LONG, SHORT = 30_000, 900
"""Tokens of a prompt that is prefilled in the PrfaaS cluster, and of one that is not."""
BYTES = {"link_bytes": "prfaas_link_bytes_total", "wire_bytes": "prfaas_link_wire_bytes_total"}
OPERATIONS = "prfaas_usage_operations_total"
FAULTS = (Fault.CUT, Fault.CORRUPT, Fault.RESET)
LINK_BITS_PER_S = 40_000_000
"""So that a fault strikes in the middle of a transfer of some megabytes."""


def settings(folder: Path, plan: Path) -> str:
    tenants = "".join(
        f'[tenants.{name}]\nkeys = ["{key_hash(KEYS[name])}"]\n' for name in ("red", "blue")
    )
    return f"""
[gateway]
operator_keys = ["{key_hash(KEYS["operator"])}"]
[audit]
folder = "{folder}"
[routing]
plan = "{plan}"
[prices.prfaas]
gpu_hour = 2.0
per_tb = 3.0
[prices.pd]
gpu_hour = 5.0
gb_hour = 0.5
[clusters.prfaas.timing]
bytes_scale = 0.01
time_scale = 0.02
[clusters.pd.timing]
bytes_scale = 0.01
time_scale = 0.02
{tenants}"""


def two_and_two(local: Path) -> Path:
    """Write the plan of the timing engines with as many instances as there are."""
    folder = TIMING.parent / "plan"
    text = (
        (folder / "paper-case-study.toml").read_text().replace("profiles/", f"{folder}/profiles/")
    )
    path = local / "plan.toml"
    path.write_text(re.sub(r"^instances = \d+$", "instances = 2", text, flags=re.MULTILINE))
    return path


@dataclass
class Live:
    """The processes of a deployment."""

    topology: Topology
    supervisor: Supervisor
    proxy: FaultProxy
    http: aiohttp.ClientSession
    num_answered: int = 0

    @property
    def parts(self) -> dict[str, ProcessPart]:
        return {part.name: part for part in self.supervisor.parts}

    async def ask(self, tenant: str, number: int, num_tokens: int) -> None:
        """A request with a prompt that is new; what becomes of its transfer does not matter."""
        prompt = [number % 200, number // 200, *([7] * num_tokens)]
        body = {"model": "prfaas-timing", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
        url = f"{self.topology.gateway_url}/v1/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()
        self.num_answered += 1

    async def counters(self, name: str) -> Counter[str]:
        """Counters of a part, summed over their labels."""
        headers = {"Authorization": f"Bearer {KEYS['operator']}"}
        url = self.parts[name].health_url
        async with self.http.get(f"{url.rpartition('/')[0]}/metrics", headers=headers) as reply:
            assert reply.status == 200
            lines = (await reply.text()).splitlines()
        found: Counter[str] = Counter()
        for line in lines:
            if not line.startswith("#"):
                found[line.partition("{")[0].partition(" ")[0]] += float(  # type: ignore[assignment]
                    line.rpartition(" ")[2]
                )
        return found

    async def linked(self) -> None:
        """Wait until the link is up."""
        headers = {"Authorization": f"Bearer {KEYS['operator']}"}
        url = f"{self.topology.gateway_url}/control/status"
        while True:
            async with self.http.get(url, headers=headers) as reply:
                if all(link["is_up"] for link in (await reply.json())["links"]):
                    return
            await asyncio.sleep(0.02)

    async def moved(self, num_bytes: int) -> None:
        """Wait until that many more bytes have crossed the link."""
        until = self.proxy.num_bytes + num_bytes
        while self.proxy.num_bytes < until:  # noqa: ASYNC110 - the proxy signals nobody
            await asyncio.sleep(0.002)


@asynccontextmanager
async def live(local: Path) -> AsyncIterator[Live]:
    topology = await laid_out(*placed(TIMING, local, settings(local / "audit", two_and_two(local))))
    proxy = FaultProxy(topology.pools[DESTINATION], buffer_bytes=1 << 16)
    await proxy.open()
    stages = parts(topology)
    put_between(stages, SOURCE, DESTINATION, proxy.port)
    supervisor = Supervisor(stages)
    try:
        await supervisor.start()
        async with aiohttp.ClientSession() as http:
            yield Live(topology, supervisor, proxy, http)
    finally:
        await supervisor.stop()
        await proxy.close()


@pytest.mark.timeout(240)
async def test_logs_of_both_sites_counters_and_bill_are_the_same_over_faults(
    tmp_path: Path,
) -> None:
    async with live(tmp_path) as site:
        await site.linked()
        site.proxy.link_bits_per_s = LINK_BITS_PER_S
        for number, fault in enumerate(FAULTS):
            await site.linked()
            asked = [
                asyncio.create_task(site.ask(tenant, 10 * number + at, length))
                for at, (tenant, length) in enumerate(
                    (("red", LONG), ("blue", LONG), ("red", SHORT), ("blue", SHORT))
                )
            ]
            await site.moved(200_000)
            site.proxy.strike(fault)
            await asyncio.gather(*asked)
        site.proxy.link_bits_per_s = 0
        await site.linked()
        await site.ask("red", 100, LONG)
        # Each part is asked for its counters when nothing moves, and then ends in order.
        pools = {name: await settled(site, name) for name in (SOURCE, DESTINATION)}
        gateway = await settled(site, "gateway")
    audit = tmp_path / "audit"
    for name in (SOURCE, DESTINATION, "gateway"):
        assert verify(audit, name, logs_of(audit)[name]).is_intact
    written: Counter[str] = Counter()
    for name, counted in pools.items():
        lines = [line for line in records(logs_of(audit)[name]) if line.kind == RecordKind.MOVEMENT]
        for field, metric in BYTES.items():
            logged = sum(line.fields[field] for line in lines)
            assert logged == counted[metric], (name, field)
            written[field] += logged
    bill = make_bill(logs_in_folders([audit]), Period())
    total = bill.total().amounts
    assert total.sent_bytes + total.received_bytes == written["link_bytes"]
    assert total.sent_wire_bytes + total.received_wire_bytes == written["wire_bytes"]
    assert total.received_bytes < total.sent_bytes, "no fault struck a transfer"
    own = make_bill({"gateway": logs_of(audit)["gateway"]}, Period()).total().amounts
    assert own.count == gateway[OPERATIONS]
    assert own.tokens == gateway["prfaas_usage_tokens_total"]
    assert own.engine_ns / NS_PER_S == pytest.approx(
        gateway["prfaas_usage_engine_seconds_total"], rel=1e-9
    )
    assert (total.tokens, total.engine_ns, total.slot_ns) == (
        own.tokens,
        own.engine_ns,
        own.slot_ns,
    )
    # Every byte has its tenant and a price: the tickets are those of the gateway's log.
    moved = {
        key.tenant: row.amounts.sent_bytes
        for key, row in bill.rows.items()
        if key.phase == "transfer"
    }
    assert set(moved) == {"red", "blue"}
    assert bill.total().num_unpriced == 0


async def settled(site: Live, name: str) -> Counter[str]:
    """Counters of a part once they no longer change."""
    before = await site.counters(name)
    while True:
        await asyncio.sleep(0.2)
        found = await site.counters(name)
        kept = [metric for metric in found if metric.startswith(("prfaas_link_", "prfaas_usage_"))]
        # A gateway counts usage when it records it, every few seconds.
        is_counted = name != "gateway" or found[OPERATIONS] >= 2 * site.num_answered
        if is_counted and all(found[m] == before[m] for m in kept if "storage" not in m):
            return found
        before = found
