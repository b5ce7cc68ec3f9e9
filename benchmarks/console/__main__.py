"""First paint, weight and memory of the console's page, in Chromium, with a deployment at work.

python -m benchmarks.console [--minutes 10]

Starts examples/timing.toml with requests going through it once a second, opens the page, and looks
at its heap, garbage collected, every half minute.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from playwright.async_api import CDPSession, Page, async_playwright

from prfaas.cli.deploy.topology import parts
from tests.deployments import TIMING, laid_out, placed, started

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
