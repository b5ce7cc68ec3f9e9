"""Pages of the console in a browser: widths, themes, keyboard alone, axe-core, 10,000 requests.

A gateway between scripted parts, whose requests were made up (`sample_records.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from prfaas.gateway.telemetry.request_records import RECORDS_MAX
from prfaas.gateway.tenancy.tenants import key_hash, new_key
from tests.console.sample_records import fill
from tests.gateway.conftest import World, running

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[2] / "console/node_modules/axe-core/axe.min.js"
WIDTHS = (1440, 768, 390)
PAGES = ("now", "requests", "requests/request-000194", "what-if", "replay", "sign-in")
NUM_SHOWN = 300
SOON_MS = 60_000
FRAMES_MAX = 200
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
WIDEST = """
[...document.querySelectorAll("body *")]
  .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .slice(0, 3).map((each) => each.outerHTML.slice(0, 160))
"""
KEYS = {"alice": new_key(), "victor": new_key()}
SERIOUS = ("serious", "critical")
ROW = ".requests .body [role=row]"
NEXT_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on this machine"),
    pytest.mark.timeout(400),
]


@dataclass
class Desk:
    """A gateway, and a browser in front of it."""

    world: World
    browser: Browser
    artefacts: Path

    async def page(self, width: int = 1440, theme: Any = "light", **settings: Any) -> Page:
        viewport: Any = {"width": width, "height": 900}
        context = await self.browser.new_context(viewport=viewport, color_scheme=theme, **settings)
        page = await context.new_page()
        page.set_default_timeout(SOON_MS)
        return page

    async def open(self, page: Page, name: str) -> None:
        await page.goto(f"{self.world.url}/console/#/{name}")
        await expect(page.locator("main")).not_to_contain_text("Waiting for")

    async def sign_in(self, page: Page, who: str = "alice") -> None:
        await self.open(page, "now")
        await page.get_by_label("Operator's key").fill(KEYS[who])
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator(".who")).to_contain_text(who)


@pytest.fixture
async def desk(checkpoint: Path, identities: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    operators = {
        "alice": {"keys": [key_hash(KEYS["alice"])]},
        "victor": {"keys": [key_hash(KEYS["victor"])], "rank": "view"},
    }
    artefacts = Path(os.environ.get("PRFAAS_ARTEFACTS", tmp_path / "artefacts"))
    artefacts.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - a moment, before all
    expect.set_options(timeout=SOON_MS)
    async with (
        running(checkpoint, identities, tmp_path / "state", operators=operators) as world,
        async_playwright() as playwright,
    ):
        fill(world.gateway.records, NUM_SHOWN, time.time())
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Desk(world, browser, artefacts)
        await browser.close()


async def test_no_page_is_wider_than_the_screen_and_axe_finds_nothing_serious(desk: Desk) -> None:
    found: list[str] = []
    for theme in ("light", "dark"):
        page = await desk.page(theme=theme)
        complaints: list[str] = []
        page.on("pageerror", partial(_complain, complaints))
        for name in PAGES:
            if name == "now":
                await desk.sign_in(page)
            if name == "sign-in":
                await page.get_by_role("button", name="Sign out").click()
                await expect(page.get_by_label("Operator's key")).to_be_visible()
            else:
                await desk.open(page, name)
            await settled(page, name)
            for width in WIDTHS:
                await page.set_viewport_size({"width": width, "height": 900})
                if not await fits(page):
                    widest = await page.evaluate(WIDEST)
                    found.append(f"{name} {width} {theme} is wider: {widest}")
                shot = f"{name.replace('/', '-')}-{width}-{theme}.png"
                await page.screenshot(path=desk.artefacts / shot)
                found += [f"{name} {width} {theme}: {each}" for each in await axe(page)]
            await page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        assert not complaints
        await page.context.close()
    assert not found, "\n".join(found)


def _complain(complaints: list[str], error: object) -> None:
    complaints.append(str(error))


async def fits(page: Page) -> bool:
    """Charts take some frames to follow the width."""
    for _ in range(FRAMES_MAX):
        await page.evaluate(NEXT_FRAMES)
        if await page.evaluate(FITS):
            return True
    return False


async def settled(page: Page, name: str) -> None:
    """The page shows what it has to."""
    waits = {
        "now": ".topology",
        "requests": f"{ROW} >> nth=0",
        "requests/request-000194": ".waterfall >> nth=0",
        "what-if": ".verdict",
    }
    if name in waits:
        await expect(page.locator(waits[name]).first).to_be_visible()


async def axe(page: Page) -> list[str]:
    """Serious findings of axe-core; none where it is not installed."""
    if not AXE.exists():
        return []
    # The page's own policy lets no script in; this is a tool of the browser, not of the page.
    await page.evaluate(AXE.read_text(encoding="utf-8"))
    answer = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:160] for node in each['nodes'][:3]]}"
        for each in answer["violations"]
        if each["impact"] in SERIOUS
    ]


@pytest.mark.skipif(not AXE.exists(), reason="no console/node_modules: `npm ci` in console/")
async def test_axe_is_there_and_finds_what_is_wrong(desk: Desk) -> None:
    page = await desk.page()
    await page.set_content("<html><body><img src='data:,'><button></button></body></html>")
    assert {each.split(":")[0] for each in await axe(page)} >= {"image-alt", "button-name"}


async def test_signing_in_and_out_leaves_no_key_in_the_browser(desk: Desk) -> None:
    page = await desk.page()
    await desk.open(page, "now")
    await page.get_by_label("Operator's key").fill("sk-prfaas-wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("no operator's key")
    await expect(page.get_by_label("Operator's key")).to_have_value("")
    assert await page.get_by_label("Operator's key").get_attribute("type") == "password"
    await desk.sign_in(page)
    await expect(page.locator(".who")).to_have_text("alice, may change")
    await expect(page.locator(".topology")).to_be_visible()
    kept = await page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
    )
    assert KEYS["alice"] not in kept
    assert await page.evaluate("document.cookie") == ""
    [cookie] = await page.context.cookies()
    assert (cookie.get("httpOnly"), cookie.get("sameSite")) == (True, "Strict")
    await page.reload()
    await expect(page.locator(".who")).to_be_visible()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Operator's key")).to_be_visible()
    assert not await page.context.cookies()


async def test_a_session_that_is_over_asks_for_the_key_again(desk: Desk) -> None:
    page = await desk.page()
    await desk.sign_in(page)
    await page.context.clear_cookies()
    await page.reload()
    await expect(page.get_by_label("Operator's key")).to_be_focused()


async def test_filters_stand_in_the_address_and_rows_hold_still(desk: Desk) -> None:
    page = await desk.page()
    await desk.sign_in(page)
    await desk.open(page, "requests?tenant=search&course=continued")
    rows = page.locator(ROW)
    await expect(rows.first).to_contain_text("continued")
    await expect(page.get_by_label("tenant")).to_have_value("search")
    total = await page.locator(".above [role=status]").inner_text()
    assert re.match(r"[1-9][0-9]* of the last 300 requests", total)
    first = await rows.first.inner_text()
    fill(desk.world.gateway.records, 21 * 4, time.time() + 1)
    await expect(page.get_by_role("button", name="4 new")).to_be_visible()
    assert await rows.first.inner_text() == first
    await page.get_by_role("button", name="4 new").click()
    await expect(page.get_by_role("button", name="4 new")).to_have_count(0)
    await page.get_by_label("what happened").select_option("hedged")
    await expect(rows.first).to_contain_text("hedged")
    assert page.url.endswith("#/requests?tenant=search&course=hedged")
    await rows.nth(1).get_by_role("link").click()
    await expect(page.locator(".fallbacks")).to_contain_text("prefill left, late")
    await expect(page.locator(".waterfall .name", has_text="left")).to_be_visible()
    await page.get_by_role("link", name="all requests").click()
    await expect(page.get_by_label("what happened")).to_have_value("hedged")
    await page.get_by_role("button", name="Clear").click()
    await expect(page.get_by_label("tenant")).to_have_value("")


async def test_charts_have_one_cursor_and_a_stretch_becomes_the_time(desk: Desk) -> None:
    page = await desk.page()
    await desk.sign_in(page)
    await desk.open(page, "requests")
    plots = page.locator(".requests-charts .u-over")
    await expect(plots.first).to_be_visible()
    box = await plots.first.bounding_box()
    assert box is not None
    across, middle = box["x"] + box["width"] * 0.8, box["y"] + box["height"] / 2
    await page.mouse.move(across, middle)
    await expect(page.locator(".requests-charts .at")).to_have_count(await plots.count())
    await page.mouse.down()
    await page.mouse.move(across + 60, middle, steps=4)
    await page.mouse.up()
    await expect(page.get_by_role("combobox", name="time")).to_have_value("span")
    assert re.search(r"since=\d+&until=\d+$", page.url)


async def test_the_reason_is_on_phones_too(desk: Desk) -> None:
    page = await desk.page(width=390, has_touch=True)
    await desk.sign_in(page)
    await desk.open(page, "requests")
    why = page.locator(f"{ROW} .why").first
    await expect(why).to_be_visible()
    await expect(why).to_contain_text("new tokens against")
    shown = await page.locator(ROW).first.bounding_box()
    assert shown is not None
    assert shown["height"] > 80


async def test_changes_are_asked_for_and_made_by_keyboard_alone(desk: Desk) -> None:
    page = await desk.page()
    await desk.sign_in(page)
    await expect(page.locator(".topology")).to_be_visible()
    await reach(page, "summary")
    await page.keyboard.press("Enter")
    await reach(page, "[aria-label='Drain decode']")
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("Recorded as done by operator alice")
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)
    assert not desk.world.gateway.driver.is_drained("decode")
    await reach(page, "[aria-label='Drain decode']")
    await page.keyboard.press("Enter")
    await expect(dialog).to_be_visible()
    await reach(page, "dialog [type=submit]")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Resume decode")).to_be_visible()
    assert desk.world.gateway.driver.is_drained("decode")
    await expect(page.locator(".changes li").first).to_contain_text("alice: engine decode drain")
    await desk.open(page, "requests")
    await reach(page, f"{ROW} a")
    await page.keyboard.press("Enter")
    await expect(page.locator("h1.id")).to_contain_text("request-")


async def reach(page: Page, selector: str) -> None:
    """Press Tab until an element that fits has the focus."""
    for _ in range(200):
        await page.keyboard.press("Tab")
        if await page.evaluate("s => document.activeElement?.matches(s) ?? false", selector):
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            row = page.locator(f"{ROW}:has(a:focus-visible)")
            assert outline != "none" or await row.count(), selector
            return
    raise AssertionError(f"Tab does not reach {selector}")


async def test_who_may_look_can_confirm_nothing(desk: Desk) -> None:
    page = await desk.page()
    await desk.sign_in(page, "victor")
    await page.get_by_text("Drain, switch off, freeze").click()
    await page.get_by_role("button", name="Freeze the loops").click()
    await expect(page.get_by_role("dialog")).to_contain_text("you may look and change nothing")
    await expect(page.get_by_role("dialog").locator("[type=submit]")).to_be_disabled()


async def test_of_ten_thousand_requests_only_those_on_the_screen_exist(desk: Desk) -> None:
    fill(desk.world.gateway.records, RECORDS_MAX, time.time())
    page = await desk.page()
    await desk.sign_in(page)
    await desk.open(page, "requests?last=all")
    table, most = page.get_by_role("table", name="Requests"), 0
    total = RECORDS_MAX + 1  # with the row of names
    while await table.get_attribute("aria-rowcount") != f"{total}":
        before = await table.get_attribute("aria-rowcount")
        await page.evaluate("scrollTo(0, document.body.scrollHeight)")
        await expect(table).not_to_have_attribute("aria-rowcount", f"{before}")
        most = max(most, await page.locator(ROW).count())
    await page.evaluate("scrollTo(0, document.body.scrollHeight)")
    await expect(page.locator(f"{ROW}[aria-rowindex='{total}']")).to_be_visible()
    assert most < 100
