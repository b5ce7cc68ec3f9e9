"""The market, live and simulated: the same requests, prices and revocation, and what they cost.

python -m benchmarks.market.live [--minutes 8] [--rate 0.4]

Timing engines on this machine, at a fifth of their time and a thousandth of their bytes; links have
budgets instead of distances. Prices are scaled so that costs are those of the unscaled clusters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import click

from benchmarks.case_study.load import one, prepare, ready
from prfaas.engines.timing.api.vocabulary import Vocabulary
from prfaas.sim.engine.simulation import Simulation
from prfaas.sim.scenario.scenario_loader import Scenario, load_scenario
from prfaas.units import NS_PER_S

ROOT = Path(__file__).parents[2]
TIME, BYTES = 0.2, 0.001
"""Seconds of the wall clock for a second of the profiles; bytes for a byte."""
MODEL = "timing-market"
SECOND_PRICE, TARGET_S = 0.001, 15.0
NOTICE_S = 60.0
CLUSTERS = {
    # price of a GPU hour before and after the middle, of a TB, Gbit/s, profile
    "east": (1.2, 3.6, 2.0, 20, "paper-8xh200-1t"),
    "west": (3.6, 1.2, 4.0, 20, "paper-8xh200-1t"),
    "slow": (0.9, 0.9, 6.0, 5, "paper-8xh20-1t"),
    "spot": (1.0, 1.0, 4.0, 10, "paper-8xh200-1t"),
}
NUM_HOME = {"prefill": 2, "decode": 2}


def plan(*, scaled: bool) -> str:
    """The plan file; with `scaled`, its links have the rates of the live budgets."""
    factor = BYTES / TIME if scaled else 1.0
    head = """title = "The market"
[model]
name = "internal 1T (KDA:MLA 3:1)"
kv_bytes_per_token = "17280B"
kv_state = "173.925MiB"
[workload]
distribution = "lognormal"
mu = 9.9
sigma = 1.0
min_tokens = 128
max_tokens = 131072
output_tokens = 16
"""
    profiles = ROOT / "examples" / "plan" / "profiles"
    remote = "".join(
        f'[[prfaas]]\nname = "{name}"\ninstances = 1\ngpus_per_instance = 8\n'
        f'profile = "{profiles}/{profile}.toml"\n[prfaas.link]\n'
        f'bandwidth = "{gbps * factor * 1e3:.0f}Mbps"\nprice_per_tb = {per_tb}\n'
        for name, (_, _, per_tb, gbps, profile) in CLUSTERS.items()
    )
    return (
        f'{head}{remote}[pd]\nname = "home"\ninstances = {sum(NUM_HOME.values())}\n'
        f'gpus_per_instance = 8\nprofile = "{profiles}/paper-8xh20-1t.toml"\ntpot_max = "25ms"\n'
    )


def prices(start_s: float, middle_s: float, money: float, traffic: float) -> str:
    """`[prices]`, times of day in seconds, prices times `money` and `traffic`."""

    def clock(at_s: float) -> str:
        hours, rest = divmod(round(at_s) % 86_400, 3600)
        return f"{hours:02}:{rest // 60:02}:{rest % 60:02}"

    tables = [f"[prices.home]\ngpu_hour = {money}\n"]
    for name, (before, after, per_tb, _, _) in CLUSTERS.items():
        steps = sorted(((clock(start_s), before), (clock(middle_s), after)))
        shown = ", ".join(f'{{ at = "{at}", price = {price * money} }}' for at, price in steps)
        tables.append(f"[prices.{name}]\ngpu_hour = [{shown}]\nper_tb = {per_tb * traffic}\n")
    return "".join(tables)


def scenario(place: Path, minutes: float, rate: float) -> Scenario:
    """The simulated run."""
    seconds = minutes * 60
    (place / "plan.toml").write_text(plan(scaled=False))
    (place / "scenario.toml").write_text(
        f"""title = "The market"
plan = "plan.toml"
[workload]
rate = {rate}
duration = "{seconds}s"
[routing]
policy = "cost"
admission = false
prefill_instances = {NUM_HOME["prefill"]}
[placement]
second_price = {SECOND_PRICE}
[slo]
ttft = "{TARGET_S}s"
[signals]
interval = "{1 / TIME}s"
stale_after = "{3 / TIME}s"
[[revocation]]
cluster = "spot"
at = "{seconds / 4 + NOTICE_S}s"
duration = "{seconds / 4}s"
notice = "{NOTICE_S}s"
{prices(0, seconds / 2, 1.0, 1.0)}"""
    )
    return load_scenario(place / "scenario.toml")


def deployment(place: Path, port: int) -> Path:
    """The deployment file of the live run."""
    (place / "live-plan.toml").write_text(plan(scaled=True))
    # Before the load begins, prices are those of its first half.
    (place / "prices.toml").write_text(prices(0, 86_399, 1 / TIME, 1 / BYTES))
    timing = f'plan = "{place}/plan.toml"\ntime_scale = {TIME}\nbytes_scale = {BYTES}\n'
    text = f"""state = "{place}/state"
[model]
name = "{MODEL}"
path = "{place}/model"
generate = true
[gateway]
listen = "127.0.0.1:{port}"
[routing]
offload_threshold = 1
policy = "cost"
plan = "{place}/live-plan.toml"
second_price = {SECOND_PRICE / TIME}
price_file = "{place}/prices.toml"
ttft_max = "{TARGET_S * TIME}s"
[security]
identities = "{place}/identities"
generate = true
"""
    for name, (_, _, _, gbps, _) in CLUSTERS.items():
        rate = f"{gbps * BYTES / TIME * 1e3:.0f}Mbps"
        text += (
            f'[clusters.{name}]\nrole = "prfaas"\n[clusters.{name}.timing]\n{timing}'
            f'[clusters.{name}.pools.{name}-pool]\nmemory = "256MiB"\n'
            f'[clusters.{name}.pools.{name}-pool.links.home-pool]\nbudget = "{rate}"\n'
            f'[clusters.{name}.engines.{name}-0]\npool = "{name}-pool"\nhost_memory = "64MiB"\n'
        )
    text += f'[clusters.home]\nrole = "pd"\n[clusters.home.timing]\n{timing}one_process = true\n'
    text += '[clusters.home.pools.home-pool]\nmemory = "512MiB"\n'
    for role, count in NUM_HOME.items():
        for number in range(count):
            text += (
                f'[clusters.home.engines.home-{role}-{number}]\npool = "home-pool"\n'
                f'role = "{role}"\nhost_memory = "64MiB"\n'
            )
    path = place / "live.toml"
    path.write_text(text)
    return path


@contextlib.asynccontextmanager
async def started(file: Path, log: Path) -> AsyncIterator[None]:
    """`prfaas up` on a file."""
    with log.open("wb") as out:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "prfaas", "up", str(file)), stdout=out, stderr=out, cwd=ROOT
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                up.terminate()
            await up.wait()


async def live(place: Path, run: Scenario, minutes: float, port: int) -> dict[str, Any]:
    """Run live; what the gateway counted, and what went wrong."""
    url, seconds = f"http://127.0.0.1:{port}", minutes * 60
    file = deployment(place, port)
    spec: dict[str, object] = {
        "requests": [
            (r.arrived_at_ns / NS_PER_S * TIME, r.num_prompt_tokens, r.num_output_tokens)
            for r in run.requests()
        ]
    }
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        started(file, place / "up.log"),
        aiohttp.ClientSession(timeout=timeout, connector=connector) as http,
    ):
        await ready(http, url)
        asks = await asyncio.to_thread(prepare, spec, MODEL, Vocabulary(str(place / "model")))
        start, day_s = time.monotonic(), time.time() % 86_400
        text = prices(day_s, day_s + seconds / 2 * TIME, 1 / TIME, 1 / BYTES)
        (place / "prices.toml").write_text(text)
        tasks = [asyncio.create_task(one(http, url, ask, start)) for ask in asks]

        async def announce(at_s: float, **body: object) -> None:
            await asyncio.sleep(start + at_s * TIME - time.monotonic())
            async with http.post(f"{url}/control/prices/spot", json=body) as answer:
                answer.raise_for_status()

        await announce(seconds / 4, leaves_in_s=NOTICE_S * TIME)
        await announce(seconds / 2 + NOTICE_S, stays=True)
        outcomes = await asyncio.gather(*tasks)
        async with http.get(f"{url}/control/status") as answer:
            status = await answer.json()
    return {"prices": status["prices"], "outcomes": outcomes}


@click.command()
@click.option("--minutes", default=8.0, show_default=True, help="Of the profiles.")
@click.option("--rate", default=0.4, show_default=True, help="Requests per second of the profiles.")
@click.option("--port", default=18_719, show_default=True)
def main(minutes: float, rate: float, port: int) -> None:
    """Print both runs and their ratio."""
    with tempfile.TemporaryDirectory(prefix="market-") as folder:
        place = Path(folder)
        run = scenario(place, minutes, rate)
        simulation = Simulation(run.setup, run.requests())
        simulation.run()
        market = simulation.front.dispatcher.market
        assert market is not None
        found = asyncio.run(live(place, run, minutes, port))
    costs = {e["cluster"]: e["compute_cost"] + e["bytes_cost"] for e in found["prices"]}
    counts = {e["cluster"]: e["num_requests"] for e in found["prices"]}
    click.echo("| cluster | sent, simulated | sent, live | cost, simulated | cost, live |")
    click.echo("|---|---|---|---|---|")
    for name, count in market.num_sent.items():
        spent = market.gpu_cost[name] + market.link_cost[name]
        click.echo(f"| {name} | {count} | {counts[name]} | {spent:.4f} | {costs[name]:.4f} |")
    ratio = sum(costs.values()) / market.spent
    click.echo(f"| all | | | {market.spent:.4f} | {sum(costs.values()):.4f} |")
    errors = [each["error"] for each in found["outcomes"] if each["error"]]
    late = max(each["late"] for each in found["outcomes"])
    shown = {"live_by_simulated": round(ratio, 4), "errors": errors[:3], "num_errors": len(errors)}
    click.echo(json.dumps(shown | {"sent_late_s": round(late, 3)}))


if __name__ == "__main__":
    main()
