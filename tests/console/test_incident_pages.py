"""Incidents in a real browser: alarm, mark, page, text; at every width, in both themes."""

from __future__ import annotations

import asyncio
import signal

import pytest
from playwright.async_api import expect

from .test_browser import CHROMIUM, CLIPPED, FITS, SOON_MS, World
from .test_browser import world as browser_world

world = browser_world
WIDTHS = (1440, 768, 390)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on this machine"),
    pytest.mark.timeout(400),
]


async def keep(world: World, name: str) -> None:
    """Take pictures; nothing sticks out sideways, no card hides its text."""
    for theme in ("light", "dark"):
        await world.page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        for width in WIDTHS:
            await world.page.set_viewport_size({"width": width, "height": 900})
            while not await world.page.evaluate(FITS):  # noqa: ASYNC110 - nobody signals it
                await asyncio.sleep(0.01)
            path = world.artefacts / f"{name}-{theme}-{width}.png"
            await world.page.screenshot(path=path, full_page=True)
            assert not await world.page.evaluate(CLIPPED), (name, width)
    await world.page.set_viewport_size({"width": WIDTHS[0], "height": 900})


async def test_an_incident_from_its_alarm_to_its_text(world: World) -> None:
    complaints: list[str] = []
    page = world.page
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await world.open("now")
    await expect(page.get_by_text("No alarms")).to_be_visible(timeout=SOON_MS)

    world.supervisor.part("pd-1").signal(signal.SIGKILL)
    alarm = page.locator('[data-alarm="engine_down"]')
    await expect(alarm).to_contain_text("engine pd-1 is not ready", timeout=SOON_MS)
    await expect(alarm).to_contain_text("since")
    await expect(alarm).to_contain_text("docs/runbooks/engine-down.md")
    mark = page.locator(".marks a", has_text="Engine down pd-1").first
    await expect(mark).to_be_visible(timeout=SOON_MS)
    await keep(world, "alarm")

    # By keyboard from the chart's mark to the incident.
    await mark.focus()
    await page.keyboard.press("Enter")
    told = page.locator("dl.told")
    await expect(told).to_contain_text("Engine pd-1 is not ready")
    await expect(told).to_contain_text("it has not ended")
    await expect(told).to_contain_text("It gets no new requests")
    requests = page.get_by_role("link", name="Requests of this time")
    assert "#/requests?from=" in (await requests.get_attribute("href") or "")
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_role("button", name="Copy as text").click()
    await expect(page.get_by_text("copied")).to_be_visible()
    text = await page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("Engine down pd-1 [critical, incident ")

    await world.supervisor.restart("pd-1")
    await expect(told).to_contain_text("to 20", timeout=SOON_MS)
    await keep(world, "incident")

    await world.open("incidents")
    row = page.locator("table.incidents tbody tr", has_text="Engine down pd-1")
    await expect(row).to_be_visible()
    await page.get_by_label("Kind").select_option("link")
    await expect(row).to_have_count(0)
    await page.get_by_label("Kind").select_option("engine")
    await page.get_by_label("Find").fill("pd-1")
    await expect(row).to_be_visible()
    await keep(world, "incidents")
    assert not complaints
