"""`prfaas demo`: two clusters on this machine, sample requests, one table."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from pathlib import Path

import aiohttp
import click
from rich.live import Live

from prfaas.cli.common.options import DEPLOYMENT
from prfaas.cli.common.signals import run_until_stopped, unless_stopped
from prfaas.cli.deploy.demo_client import JsonObject, body_of, serve_all
from prfaas.cli.deploy.demo_table import DemoRow, demo_requests, table_of
from prfaas.cli.deploy.topology import Topology
from prfaas.cli.deploy.up_command import console, running
from prfaas.cli.parts.gateway_command import listen_on
from prfaas.config.clusters import ClusterRole
from prfaas.config.load import load_deployment
from prfaas.errors import EngineError
from prfaas.limited_files import file_or_shipped
from prfaas.units import format_size

EXAMPLE = Path("examples/laptop.toml")
"""Deployment file of `--engines vllm`."""
NUM_REMOTE_MIN = 4


@click.command()
@click.argument("file", type=DEPLOYMENT, required=False)
@click.option(
    "--engines",
    type=click.Choice(["timing", "vllm"]),
    help="timing: engines that compute nothing, no GPU needed; vllm: real engines on this machine. "
    "Without FILE, timing if absent.",
)
@click.option("--once", is_flag=True, help="With timing engines: end after the table.")
def demo(file: Path | None, engines: str | None, *, once: bool) -> None:
    """Two sites on this machine, sample requests, and the reason for the path of each.

    With timing engines, which compute nothing, everything else is real: gateway, pool nodes, KV
    blocks, and the TLS link between the sites. After the table sample traffic goes on until Ctrl-C.
    Exit code 0 if all requests of the table were answered and some prefilled in the PrfaaS cluster.

    With vLLM, or a deployment FILE, it sends twelve chat turns and documents, and gets the same
    answers from a single engine, first with an empty cache, then with the prompt's prefix cached.
    Exit code 0 if all twelve equal one of these and at least four were prefilled in the PrfaaS
    cluster.

    \b
    Examples:
      prfaas demo                     timing engines
      prfaas demo --once              end after the table
      prfaas demo --engines vllm      real engines, a minute to start
      prfaas demo laptop.toml
    """
    if file is None and engines != "vllm":
        from prfaas.cli.deploy.timing_demo import run_timing_demo

        sys.exit(run_timing_demo(once=once))
    if once or (file is not None and engines is not None):
        raise click.UsageError("--once and --engines do not go with FILE, nor --once with vllm.")
    compare(file or file_or_shipped(EXAMPLE))


def compare(file: Path) -> None:
    """Run the deployment in a file, compare twelve answers, and exit."""
    outcome: list[bool] = []

    async def run(stop: asyncio.Event) -> None:
        deployment = listen_on(load_deployment(file), ("127.0.0.1", 0))
        async with running(deployment, file, stop) as (topology, _):
            outcome.append(await unless_stopped(_run(topology), stop))

    run_until_stopped(run)
    sys.exit(0 if outcome == [True] else 1)


async def _run(topology: Topology) -> bool:
    rows: list[DemoRow] = []
    async with aiohttp.ClientSession() as session:
        began = time.monotonic()
        with Live(console=console, refresh_per_second=4) as live:

            def show() -> None:
                if console.is_terminal:
                    live.update(table_of(rows, console.width))

            await serve_all(session, topology, demo_requests(), rows, show)
            served_s = time.monotonic() - began
            for row in rows:
                salt = secrets.token_hex(16)  # nobody's before: nothing is cached
                row.alone = await _ask_alone(session, topology, row, salt)
                row.again = await _ask_alone(session, topology, row, salt)
                show()
            live.update(table_of(rows, console.width))
        is_good = _summarise(rows, served_s)
        await _show_links(session, topology)
    return is_good


async def _ask_alone(
    session: aiohttp.ClientSession, topology: Topology, row: DemoRow, salt: str
) -> str:
    """The same request to a single engine; its cache has only blocks with this salt."""
    cluster = topology.deployment.with_role(ClusterRole.PD)[0]
    url = f"{topology.engines[next(iter(cluster.engines))]}/v1/chat/completions"
    body = body_of(topology, row.messages) | {"cache_salt": salt}
    async with session.post(url, json=body) as reply:
        if reply.status != 200:
            raise EngineError(f"the engine answered {reply.status}: {await reply.text()}")
        answer: JsonObject = await reply.json()
    return str(answer["choices"][0]["message"]["content"])


async def _show_links(session: aiohttp.ClientSession, topology: Topology) -> None:
    async with session.get(f"{topology.gateway_url}/control/links") as reply:
        links: list[JsonObject] = (await reply.json())["links"]
    for link in links:
        console.print(link_line(link))


def link_line(link: JsonObject) -> str:
    """Return the measurements of a link in one line."""
    return (
        f"link        {link['source']} to {link['destination']}: "
        f"{format_size(link['arrived_bytes'])} over {link['num_connections']} connections, "
        f"round trip {link['rtt_ns'] / 1e6:.1f} ms, "
        f"{link['retransmits']} segments sent again"
    )


def _summarise(rows: list[DemoRow], served_s: float) -> bool:
    remote = [row for row in rows if row.record["path"] == "remote"]
    tokens = sum(row.record["num_new_tokens"] for row in rows)
    shipped = sum(row.record["num_new_tokens"] for row in remote)
    egress = sum(row.record["kv_bytes"] for row in rows)
    identical = sum(row.is_identical for row in rows)
    as_cached = sum(row.is_as_cached for row in rows)
    cached = sum(bool(row.record["cached_tokens"]) for row in rows)
    console.print(
        f"\noffloaded   {len(remote)} of {len(rows)} requests, "
        f"{shipped / tokens:.0%} of {tokens:,} new tokens"
    )
    console.print(
        f"egress      {format_size(egress)} of KV cache, encrypted, in {served_s:.1f} s, "
        f"{egress / max(shipped, 1):,.0f} bytes a token"
    )
    console.print(f"cached      {cached} requests found a prefix in a cluster's cache")
    console.print(
        f"identical   {identical} of {len(rows)} answers to those of one engine alone, "
        f"{as_cached} to those it gives from its own prefix cache"
    )
    explained = all(row.is_identical or row.is_as_cached for row in rows)
    return explained and len(remote) >= NUM_REMOTE_MIN and cached > 0
