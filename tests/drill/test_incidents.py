"""Six incidents are reconstructed from the log alone, and are there after a restart."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from .incidents import REQUESTS_MAX, Deployment, Incident, has_ended, is_open, running, touches

SILENCE_S = 5.0
"""Time after which a pool node that says nothing counts as gone; docs/failures.md."""
FIXED = ("name", "subject", "began_at", "ended_at", "what", "when", "severity")
LATE_S = 5.0
"""A busy machine notices late."""


async def check_when(found: Incident, site: Deployment, noticed_s: float) -> None:
    """An incident began with the fault, and says so."""
    late_s = found["began_at"] - site.broken_at
    assert -1.0 <= late_s <= noticed_s + LATE_S, f"{late_s:.1f} s late\n{await site.texts()}"


async def overloaded(site: Deployment) -> Incident:
    """More requests at once than the gateway serves."""
    site.broken_at = time.time()
    statuses = await site.burst(3 * REQUESTS_MAX)
    num_refused = statuses.count(429)
    assert num_refused
    found = await site.incident("refusals", "", lambda each: each["num_requests"] >= num_refused)
    assert "gateway_full" in found["what"]
    assert "refused" in found["did"]
    return found


async def engine_killed(site: Deployment) -> Incident:
    site.signal("pd-0", signal.SIGKILL)
    found = await site.incident("engine_down", "pd-0", touches)
    await check_when(found, site, noticed_s=1.0)
    assert "continued by another engine" in found["did"]
    assert "None failed." in found["did"]
    await site.restart("pd-0")
    return await site.repaired("engine_down", "pd-0")


async def pool_stalled(site: Deployment) -> Incident:
    site.signal("prfaas-pool", signal.SIGSTOP)
    found = await site.incident("pool_silent", "prfaas-pool", is_open)
    await check_when(found, site, SILENCE_S)
    assert "silent for 5 s" in found["what"]
    site.supervisor.part("prfaas-pool").signal(signal.SIGCONT)
    found = await site.repaired("pool_silent", "prfaas-pool")
    assert touches(found)
    return found


async def link_cut(site: Deployment) -> Incident:
    site.cut()
    found = await site.incident("link_down", "prfaas-pool>pd-pool", is_open)
    await check_when(found, site, noticed_s=1.0)
    site.plug_in()
    return await site.repaired("link_down", "prfaas-pool>pd-pool")


async def pool_killed_and_strange(site: Deployment, folder: Path) -> list[Incident]:
    """A pool node is killed, and comes back with a certificate of another authority."""
    site.signal("pd-pool", signal.SIGKILL)
    found = await site.incident("pool_silent", "pd-pool", is_open)
    await check_when(found, site, noticed_s=1.0)
    give_back = site.give_strange_identity("pd-pool", folder)
    await site.restart("pd-pool")
    found = await site.incident("certificate_refused", "pd-pool", is_open)
    assert "certificate verify failed" in found["what"]
    gone = await site.incident("pool_silent", "pd-pool", has_ended)
    assert "it goes on as 'Certificate refused'" in gone["when"]
    site.supervisor.part("pd-pool").signal(signal.SIGKILL)
    give_back()
    await site.restart("pd-pool")
    strange = await site.repaired("certificate_refused", "pd-pool")
    return [await site.incident("pool_silent", "pd-pool", has_ended), strange]


async def gateway_killed(site: Deployment, kept: list[Incident]) -> None:
    """The gateway is killed while an engine is away; another one goes on with the log."""
    site.signal("prfaas-0", signal.SIGKILL)
    away = await site.incident("engine_down", "prfaas-0", is_open)
    site.signal("gateway", signal.SIGKILL)
    await site.restart("gateway")
    killed = await site.incident("gateway_killed", "gateway", has_ended)
    assert killed["began_at"] <= site.broken_at <= killed["ended_at"]
    known = {each["id"]: each for each in await site.incidents()}
    for each in kept:
        now = await site.get(f"control/incidents/{each['id']}")
        assert all(now[field] == each[field] for field in FIXED), (each, now)
        assert now["num_requests"] >= each["num_requests"]
    assert is_open(known[away["id"]])
    await site.restart("prfaas-0")
    again = await site.repaired("engine_down", "prfaas-0")
    assert again["id"] == away["id"]
    page = await site.get(f"control/incidents/{again['id']}")
    assert any("nobody watched" in step["text"] for step in page["steps"]), page["text"]


@pytest.mark.timeout(240)
async def test_six_incidents_are_reconstructed_from_the_log_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as site:
        overload = await overloaded(site)
        kept = [await engine_killed(site), await pool_stalled(site), await link_cut(site)]
        kept += await pool_killed_and_strange(site, tmp_path)
        site.broken_at = overload["began_at"]
        kept.append(await site.incident("refusals", "", has_ended))
        await gateway_killed(site, kept)
