"""The console in a real browser, against a deployment of timing engines that is worked on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Page, Route, async_playwright, expect

from prfaas.cli.deploy.topology import parts
from prfaas.cli.supervision.supervisor import Supervisor
from tests.deployments import TIMING, laid_out, placed, put_between, started
from tests.live.relay import Relay

CHROMIUM = shutil.which("chromium")
SETTINGS = """
[routing]
transfer_timeout = "60s"
[clusters.prfaas.pools.prfaas-pool.links.pd-pool]
budget = "100Mbps"
"""
SLOW_BYTES_PER_S = 60_000
WIDTHS = (1280, 390)
SOON_MS = 60_000
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
"""Charts take a moment to follow the width."""
CLIPPED = """
[...document.querySelectorAll(".link, .cluster, .pool, .tier, .figures > div, .name, .scroll")]
  .filter((card) => card.checkVisibility({ contentVisibilityAuto: true }))
  .filter((card) => card.scrollHeight > card.clientHeight + 1
    || card.scrollWidth > card.clientWidth + 1)
  .map((card) => card.innerText)
"""

CLICK_EVERYWHERE = """
() => void setTimeout(() => {
  const canvas = document.querySelector("#part-5 canvas");
  if (!canvas) return;
  const box = canvas.getBoundingClientRect();
  for (let y = 10; y < box.height; y += 20)
    for (let x = 10; x < box.width; x += 20) {
      const [clientX, clientY] = [box.left + x, box.top + y];
      canvas.dispatchEvent(new PointerEvent("pointerdown", { clientX, clientY, bubbles: true }));
    }
})
"""
"""A click on any prompt of the picture of live requests."""

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on this machine"),
    pytest.mark.timeout(400),
]


@dataclass
class World:
    url: str
    relay: Relay
    http: aiohttp.ClientSession
    page: Page
    artefacts: Path
    supervisor: Supervisor
    asked: list[asyncio.Task[int]] = field(default_factory=list)

    def ask(self, num_tokens: int, tag: str) -> None:
        """A request whose prompt nobody has seen."""
        body = {"model": "prfaas-timing", "prompt": (f"{tag} " * num_tokens)[:num_tokens]}
        self.asked.append(asyncio.create_task(self._post(body | {"max_tokens": 8, "stream": True})))

    async def _post(self, body: dict[str, object]) -> int:
        async with self.http.post(f"{self.url}/v1/completions", json=body) as reply:
            await reply.read()
            return reply.status

    async def open(self, page: str) -> None:
        await self.page.goto(f"{self.url}/console/#/{page}")

    async def keep(self, name: str) -> None:
        """Take pictures, at both widths; nothing sticks out sideways, no card hides its text."""
        for width in WIDTHS:
            await self.page.set_viewport_size({"width": width, "height": 900})
            while not await self.page.evaluate(FITS):  # noqa: ASYNC110 - nobody signals it
                await asyncio.sleep(0.01)
            await self.page.screenshot(path=self.artefacts / f"{name}-{width}.png", full_page=True)
            clipped = await self.page.evaluate(CLIPPED)
            assert not clipped, (name, width)
        await self.page.set_viewport_size({"width": WIDTHS[0], "height": 900})


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    topology = await laid_out(*placed(TIMING, tmp_path, SETTINGS))
    relay = Relay(topology.pools["pd-pool"])
    stages = parts(topology)
    put_between(stages, "prfaas-pool", "pd-pool", await relay.start())
    artefacts = Path(os.environ.get("PRFAAS_ARTEFACTS", tmp_path / "artefacts"))
    artefacts.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - a moment, before all
    try:
        async with (
            started(stages) as supervisor,
            aiohttp.ClientSession() as http,
            async_playwright() as playwright,
        ):
            browser = await playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"]
            )
            page = await browser.new_page()
            page.set_default_timeout(SOON_MS)
            made = World(topology.gateway_url, relay, http, page, artefacts, supervisor)
            yield made
            await asyncio.gather(*made.asked)
            await browser.close()
    finally:
        await relay.stop()


async def _as_own(route: Route) -> None:
    """Answer as if the deployment named the plan that the figures are of."""
    answer = await (await route.fetch()).json()
    await route.fulfill(json={**answer, "is_own": True})


async def test_an_operator_s_round(world: World) -> None:  # noqa: PLR0915 - one round, in order
    complaints: list[str] = []
    page = world.page
    page.on("pageerror", lambda error: complaints.append(str(error)))

    await world.open("now")
    await expect(page.get_by_text("No alarms")).to_be_visible(timeout=SOON_MS)
    for name in ("prfaas-0", "prfaas-1", "pd-0", "pd-1", "prfaas-pool", "pd-pool"):
        await expect(page.get_by_text(name, exact=True).first).to_be_visible()

    world.ask(2_000, "short")
    world.ask(30_000, "long")
    rows = page.locator(".requests .body [role=row]")
    remote = rows.filter(has_text="remote").filter(has_text="finished")
    await expect(remote.first).to_be_visible(timeout=SOON_MS)
    await world.keep("now")

    await world.open("requests")
    await remote.first.get_by_role("link").click()
    await expect(page.locator("p.why")).to_contain_text("long: 30,000 new tokens against 19,400")
    for part in ("prefill, prfaas-", "transfer, ", "decode, pd-"):
        await expect(page.locator(".waterfall .name", has_text=part)).to_be_visible()
    await expect(page.locator("tr.chosen")).to_have_count(2)  # one prefills, one decodes
    await world.keep("request")

    await world.open("what-if")
    verdict = page.locator(".verdict strong")
    await expect(verdict).to_have_text("+17.9 % at equal cost", timeout=SOON_MS)
    await world.keep("what-if")
    await page.get_by_label("PrfaaS instances").press("ArrowRight")
    await expect(verdict).not_to_have_text("+17.9 % at equal cost", timeout=SOON_MS)
    adopt = page.get_by_role("button", name="Adopt this threshold")
    await expect(adopt).to_have_count(0)  # the figures are of another deployment's plan
    await page.route("**/api/what-if", _as_own)
    await page.reload()
    tokens = (await adopt.inner_text()).split(": ")[1]
    await adopt.click()
    await page.get_by_role("dialog").get_by_role("button", name="Offload above").click()
    await expect(page.locator(".adopt span")).to_contain_text("offloads above")

    await world.open("now")
    await expect(page.locator(".link dd").last).to_have_text(tokens, timeout=SOON_MS)
    await expect(page.locator(".changes li").first).to_contain_text("operator")
    await page.get_by_label("Offload above").fill("25000")
    await page.get_by_role("button", name="Set until restart").click()
    await page.get_by_role("dialog").get_by_role("button", name="Offload above").click()
    await expect(page.locator(".threshold span")).to_contain_text("more than 25,000 new tokens")
    await expect(page.locator(".link dd").last).to_have_text("25,000 tokens", timeout=SOON_MS)

    world.relay.bytes_per_s = SLOW_BYTES_PER_S
    for number in range(8):  # more than all buffers of the slow wire take: bytes wait
        world.ask(80_000, f"slow {number}")
    link = page.locator(".link strong").first
    await expect(link).to_have_text(re.compile("bit/s"), timeout=SOON_MS)  # under load, not idle
    await expect(page.locator('[data-alarm="link_slow"]')).to_be_visible(timeout=SOON_MS)
    await world.keep("degraded")
    world.relay.bytes_per_s = 0

    await world.open("replay")
    await page.get_by_role("button", name="The last hour").click()
    await expect(page.locator(".u-wrap").first).to_be_visible()
    await page.get_by_label("time").press("Home")
    await world.keep("replay")

    await page.get_by_role("link", name="Learn").click()
    await expect(page.locator("#part-4 .own .reading")).to_contain_text("Prefill-as-a-Service")
    await expect(page.locator("#part-5 .reading")).to_contain_text("Click on one")
    await page.locator("#part-5 canvas").scroll_into_view_if_needed()
    await world.keep("learn")
    world.ask(60_000, "seen")
    while "#/requests/" not in page.url:
        with contextlib.suppress(PlaywrightError):  # it leaves the page
            await page.evaluate(CLICK_EVERYWHERE)
            await asyncio.sleep(0.1)
    await expect(page.locator("p.why")).to_be_visible(timeout=SOON_MS)

    await asyncio.gather(*world.asked)
    assert [task.result() for task in world.asked] == [200] * len(world.asked)
    assert not complaints


INCIDENT_WIDTHS = (1440, 768, 390)
INCIDENTS_CLIPPED = """
[...document.querySelectorAll(".alarms li, .told dd, .marks, .steps li, .ids li, .incidents td")]
  .filter((place) => place.scrollWidth > place.clientWidth + 1)
  .map((place) => place.innerText)
"""


async def keep_incidents(world: World, name: str) -> None:
    """Take pictures; nothing sticks out sideways, no card hides its text."""
    for theme in ("light", "dark"):
        await world.page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        for width in INCIDENT_WIDTHS:
            await world.page.set_viewport_size({"width": width, "height": 900})
            while not await world.page.evaluate(FITS):  # noqa: ASYNC110 - nobody signals it
                await asyncio.sleep(0.01)
            path = world.artefacts / f"{name}-{theme}-{width}.png"
            await world.page.screenshot(path=path, full_page=True)
            assert not await world.page.evaluate(INCIDENTS_CLIPPED), (name, width)
    await world.page.set_viewport_size({"width": INCIDENT_WIDTHS[0], "height": 900})


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
    await keep_incidents(world, "alarm")

    # By keyboard from the chart's mark to the incident.
    await mark.focus()
    await page.keyboard.press("Enter")
    told = page.locator("dl.told")
    await expect(told).to_contain_text("Engine pd-1 is not ready")
    await expect(told).to_contain_text("it has not ended")
    await expect(told).to_contain_text("It gets no new requests")
    requests = page.get_by_role("link", name="Requests of this time")
    assert "#/requests?since=" in (await requests.get_attribute("href") or "")
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.get_by_role("button", name="Copy as text").click()
    await expect(page.get_by_text("copied")).to_be_visible()
    text = await page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("Engine down pd-1 [critical, incident ")

    await world.supervisor.restart("pd-1")
    await expect(told).to_contain_text("to 20", timeout=SOON_MS)
    await keep_incidents(world, "incident")

    await world.open("incidents")
    row = page.locator("table.incidents tbody tr", has_text="Engine down pd-1")
    await expect(row).to_be_visible()
    await page.get_by_label("Kind").select_option("link")
    await expect(row).to_have_count(0)
    await page.get_by_label("Kind").select_option("engine")
    await page.get_by_label("Find").fill("pd-1")
    await expect(row).to_be_visible()
    await keep_incidents(world, "incidents")
    assert not complaints
