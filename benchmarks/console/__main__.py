"""First paint, weight, frames and memory of the console's page, in Chromium, with a deployment at
work.

python -m benchmarks.console [--minutes 10]

Frames are those of scrolling through 10,000 requests that were made up, in a gateway of its own.

Starts examples/timing.toml with requests going through it once a second, opens the page, and looks
at its heap, garbage collected, every half minute.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from playwright.async_api import Browser, CDPSession, Page, async_playwright

from prfaas.cli.deploy.topology import parts
from prfaas.gateway.telemetry.request_records import RECORDS_MAX
from prfaas.wire.identity import make_authority, make_identity
from tests.console.sample_records import fill
from tests.deployments import TIMING, laid_out, placed, started
from tests.gateway.conftest import make_checkpoint, running

LOADS = 5
LOOK_S = 30
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
WEIGHT = (
    "performance.getEntries().filter(e => e.transferSize)"
    ".reduce((sum, e) => sum + e.transferSize, 0)"
)


@asynccontextmanager
async def deployment() -> AsyncIterator[str]:
    """A running deployment; its base URL."""
    with tempfile.TemporaryDirectory() as folder:
        topology = await laid_out(*placed(TIMING, Path(folder)))
        async with started(parts(topology)):
            yield topology.gateway_url


async def work(url: str) -> None:
    """A request a second, every third of them long."""
    async with aiohttp.ClientSession() as http:
        number = 0
        while True:
            number += 1
            num_tokens = 30_000 if number % 3 == 0 else 2_000
            prompt = (f"{number} " * num_tokens)[:num_tokens]
            body = {"model": "prfaas-timing", "prompt": prompt, "max_tokens": 16, "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as reply:
                await reply.read()
            await asyncio.sleep(1)


async def heap(session: CDPSession) -> float:
    """MiB in use by scripts, garbage collected."""
    await session.send("HeapProfiler.collectGarbage")
    used: float = (await session.send("Runtime.getHeapUsage"))["usedSize"]
    return used / 2**20


async def load(page: Page, url: str) -> tuple[float, float]:
    """First paint, ms, and bytes over the wire, kB, of a page that was never opened."""
    await page.goto(f"{url}/console/")
    await page.wait_for_selector(".topology")
    return float(await page.evaluate(PAINT)), float(await page.evaluate(WEIGHT)) / 1e3


FRAMES = """
async (px) => {
  const times = [];
  let last = await new Promise(requestAnimationFrame);
  for (let step = 0; step < 400; step++) {
    scrollBy(0, px);
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  return times.sort((a, b) => a - b);
}
"""
"""Times of 400 frames, each scrolled by so many pixels, ms, in order."""


async def worked_ms(session: CDPSession) -> float:
    """CPU time of the page's own thread, whatever else the machine does."""
    found = (await session.send("Performance.getMetrics"))["metrics"]
    return float(next(each["value"] for each in found if each["name"] == "TaskDuration")) * 1e3


async def frames(browser: Browser) -> None:
    """Scroll through 10,000 requests, and print the times of frames."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_authority(place)
        for name in ("gateway", "prfaas-pool", "pd-pool"):
            make_identity(place, name)
        async with running(make_checkpoint(place / "model"), place, place / "state") as world:
            fill(world.gateway.records, RECORDS_MAX, time.time())
            page = await browser.new_page(viewport={"width": 1440, "height": 900})
            await page.goto(f"{world.url}/console/#/requests?last=all")
            table = page.get_by_role("table", name="Requests")
            await table.wait_for()
            while await table.get_attribute("aria-rowcount") != f"{RECORDS_MAX + 1}":
                await page.evaluate("scrollTo(0, document.body.scrollHeight)")
                await page.wait_for_timeout(50)
            session = await page.context.new_cdp_session(page)
            await session.send("Performance.enable", {"timeDomain": "threadTicks"})
            for px in (60, 1500):
                await page.evaluate("scrollTo(0, 800)")
                before = await worked_ms(session)
                times = await page.evaluate(FRAMES, px)
                shown = ", ".join(
                    f"{share} % within {times[len(times) * share // 100 - 1]:.1f} ms"
                    for share in (50, 95, 99)
                )
                worked = (await worked_ms(session) - before) / len(times)
                print(f"10,000 requests, {px} pixels a frame: {shown}; slowest {times[-1]:.1f} ms;")
                print(f"  the page's thread worked {worked:.2f} ms a frame")
            await page.close()


async def main(minutes: float) -> None:
    async with deployment() as url, async_playwright() as playwright:
        working = asyncio.create_task(work(url))
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        loads = []
        for _ in range(LOADS):
            context = await browser.new_context()
            loads.append(await load(await context.new_page(), url))
            await context.close()
        paints = [paint for paint, _ in loads]
        print(f"first contentful paint: median {statistics.median(paints):.0f} ms, ", end="")
        print(f"slowest of {LOADS} {max(paints):.0f} ms; page {loads[0][1]:.1f} kB")
        await frames(browser)
        page = await browser.new_page()
        await load(page, url)
        session = await page.context.new_cdp_session(page)
        print("minute  heap, MiB  nodes")
        for look in range(int(minutes * 60 / LOOK_S) + 1):
            nodes = await page.evaluate("document.getElementsByTagName('*').length")
            print(f"{look * LOOK_S / 60:6.1f}  {await heap(session):9.2f}  {nodes}", flush=True)
            await asyncio.sleep(LOOK_S)
        working.cancel()
        await browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to look at the heap")
    asyncio.run(main(parser.parse_args().minutes))
