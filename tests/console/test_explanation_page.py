"""The interactive explanation in a real browser, from its file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, Page, async_playwright, expect

from benchmarks import explanation

CHROMIUM = shutil.which("chromium")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "src/prfaas/gateway/console/assets/learn.html").as_uri()
AXE = ROOT / "console/node_modules/axe-core/axe.min.js"
WIDTHS = (1440, 768, 390)
THEMES: tuple[Any, ...] = ("light", "dark")
NUM_PARTS = 5
SOON_MS = 60_000
WIDER = """
[...document.querySelectorAll("main *")]
  .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    && !each.closest("pre, .map-place, svg"))
  .map((each) => each.tagName + "." + each.className)
"""
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on this machine"),
    pytest.mark.timeout(400),
]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        await found.close()


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    found = Path(os.environ.get("PRFAAS_ARTEFACTS", tmp_path / "artefacts"))
    found.mkdir(parents=True, exist_ok=True)
    return found


async def opened(browser: Browser, complaints: list[str], **more: Any) -> Page:
    page = await browser.new_page(**{"viewport": {"width": 1440, "height": 900}, **more})
    page.set_default_timeout(SOON_MS)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: complaints.append(asked.url) if asked.url != PAGE else None)
    await page.goto(PAGE)
    await expect(page.locator(".loading")).to_have_count(0)
    return page


def part(page: Page, number: int) -> Locator:
    return page.locator(f"#part-{number}")


@pytest.mark.parametrize("theme", THEMES)
async def test_it_fits_every_screen(browser: Browser, artefacts: Path, theme: Any) -> None:
    complaints: list[str] = []
    for width in WIDTHS:
        size = {"width": width, "height": 900}
        page = await opened(browser, complaints, viewport=size, color_scheme=theme)
        for number in range(1, NUM_PARTS + 1):
            await part(page, number).scroll_into_view_if_needed()
        while not await page.evaluate(FITS):  # noqa: ASYNC110 - nobody signals it
            await asyncio.sleep(0.01)
        assert await page.evaluate(WIDER) == [], width
        await page.screenshot(path=artefacts / f"learn-{theme}-{width}.png", full_page=True)
        if AXE.exists():
            await page.add_script_tag(path=AXE)
            answer = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            serious = [
                (found["id"], found["nodes"][0]["html"])
                for found in answer["violations"]
                if found["impact"] in ("serious", "critical")
            ]
            assert serious == [], (width, theme)
        await page.close()
    assert complaints == []


async def test_the_keyboard_alone_answers_the_four_questions(browser: Browser) -> None:
    complaints: list[str] = []
    page = await opened(browser, complaints, reduced_motion="reduce")
    press = page.keyboard.press

    one = part(page, 1)
    await expect(one.locator(".reading")).to_contain_text("going saves 1.6 s")
    await tab_to(page, one.locator("input.sides"))
    await press("Home")
    await expect(one.locator(".reading")).to_contain_text("staying saves")
    await press("End")
    await expect(one.locator(".reading")).to_contain_text("going saves 15 s")
    await tab_to(page, one.get_by_label("hybrid: short notes"))
    await press("ArrowRight")
    await expect(one.locator(".reading")).to_contain_text("staying saves")

    many = part(page, 2)
    planner = many.get_by_text("The planner computes a best place")
    await expect(planner).to_have_count(0)
    handle = many.locator("input[type=range]")
    await tab_to(page, handle)
    await press("Home")
    await expect(many.locator(".score b").first).to_contain_text(re.compile(r"^\d of 100"))
    await expect(many.locator(".reading")).to_contain_text("The remote site gets more")
    await expect(many.locator("circle")).to_have_count(2)
    for number in range(7):
        await press("ArrowRight")
        if number in (3, 6):
            await expect(many.locator("circle.now")).to_have_count(1)
    await expect(planner).to_be_visible()
    await expect(many.locator(".search")).to_contain_text("19,600 tokens")
    await press("End")
    await expect(many.locator(".reading")).to_contain_text("The local machines get more")

    broken = part(page, 3)
    await tab_to(page, broken.get_by_role("button", name="Cut the line"))
    await press("Enter")
    await tab_to(page, broken.get_by_label("Time", exact=True))
    await press("End")
    await expect(broken.locator(".reading")).to_contain_text("4:00")
    await expect(broken.locator(".reading")).to_contain_text("fell back")
    await expect(broken.locator(".reading")).to_contain_text("Nobody got an error.")
    assert complaints == []


async def tab_to(page: Page, wanted: Locator) -> None:
    """Press Tab until an element has the focus."""
    for _ in range(60):
        if await wanted.evaluate("(element) => element === document.activeElement"):
            return
        await page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {wanted}")


async def test_nothing_moves_by_itself_with_reduced_motion(browser: Browser) -> None:
    page = await opened(browser, [], reduced_motion="reduce")
    await part(page, 2).scroll_into_view_if_needed()
    await expect(part(page, 2).get_by_role("button", name="Run")).to_be_visible()
    await part(page, 3).get_by_role("button", name="Burst").click()
    await expect(part(page, 3).get_by_role("button", name="Play")).to_be_visible()


async def test_a_fault_plays_once_it_is_seen_or_chosen(browser: Browser) -> None:
    page = await opened(browser, [], viewport={"width": 390, "height": 844})
    broken = part(page, 3)
    cut = broken.get_by_role("button", name="Cut the line")
    await expect(broken.locator(".clock")).to_have_text("0:46")
    await expect(cut).to_have_attribute("aria-pressed", "false")
    await broken.locator(".pair").scroll_into_view_if_needed()
    await expect(cut).to_have_attribute("aria-pressed", "true")
    await expect(broken.locator(".words.on").first).to_contain_text("everything is read here")
    await expect(broken.get_by_label("Both sites, adaptive policy")).to_be_visible()
    await broken.locator(".narrow").get_by_label("fixed").check(force=True)
    await expect(broken.get_by_label("Both sites, fixed policy")).to_be_visible()
    await expect(broken.get_by_label("Both sites, adaptive policy")).to_be_hidden()
    await broken.get_by_text("1×", exact=True).click()
    await broken.get_by_role("button", name="Burst").click()
    await expect(broken.locator(".clock")).to_contain_text("0:4")
    await expect(broken.get_by_role("button", name="Pause")).to_be_visible()


async def test_a_clip_plays_to_its_end(browser: Browser) -> None:
    page = await opened(browser, [])
    broken = part(page, 3)
    await broken.get_by_text("100×").click()
    await broken.get_by_role("button", name="Kill a machine").click()
    await expect(broken.locator(".reading")).to_contain_text("4:00", timeout=SOON_MS)
    await expect(broken.get_by_role("button", name="Play")).to_be_visible()


async def test_the_plan_file_is_the_planner_s_question(browser: Browser) -> None:
    page = await opened(browser, [], permissions=["clipboard-read", "clipboard-write"])
    yours = part(page, 4)
    data = json.loads((ROOT / "console/src/learn/data.json").read_text())["yours"]
    for model, fleet, link, median in ((0, 0, 3, 4), (5, 2, 6, 0), (2, 3, 1, 5)):
        await yours.get_by_label("Model").select_option(str(model))
        await yours.get_by_label("Machines").select_option(str(fleet))
        await yours.get_by_label("Line", exact=False).fill(str(link))
        await yours.get_by_label("Typical prompt").fill(str(median))
        expected = explanation.plan_text(
            data["templates"][model],
            explanation.FLEETS[fleet],
            explanation.BANDWIDTHS[link],
            explanation.MEDIANS[median],
        )
        assert await yours.locator("pre").text_content() == expected
        number = list(explanation.grid()).index((model, fleet, link, median))
        gain = data["answers"][6 * number + 1]
        shown = f"{'+' if gain > 0 else '−' if gain else '±'}{abs(gain)} %"
        await expect(yours.locator(".verdict")).to_contain_text(shown)
        await expect(yours.locator("td.yours-now")).to_have_count(1)
    await yours.get_by_role("button", name="Copy the plan file").click()
    await expect(yours.get_by_role("status")).to_contain_text("prfaas plan plan.toml")


async def test_a_simulation_s_events_play_and_a_wrong_file_is_named(
    browser: Browser, tmp_path: Path
) -> None:
    page = await opened(browser, [])
    now = part(page, 5)
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("no events\n")
    await now.locator("input[type=file]").set_input_files(wrong)
    await expect(now.get_by_role("alert")).to_contain_text("wrong.jsonl holds no events")
    events = tmp_path / "events.jsonl"
    rows: list[object] = [{"kind": "prfaas-events"}]
    for run in ("paper", "adaptive"):
        rows += [
            {"run": run, "threshold": 9000, "prefill": 1, "decode": 1, "slots": 8, "prfaas": 1}
        ]
        rows += [["link", 100, 200, 0, 0.0], [50, 30_000, 0, "R", 0, 0, 900, 50, 0, 1000]]
        rows += [[60, 3000, 0, "Lrejected", *[None] * 6]]
    events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    await now.locator("input[type=file]").set_input_files(events)
    await expect(now.get_by_label("adaptive")).to_be_visible()
    await expect(now.get_by_label("Requests of a simulation")).to_be_visible()
