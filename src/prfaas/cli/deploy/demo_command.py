"""`prfaas demo`: two clusters on this machine, twelve requests, one table."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import click
from rich.live import Live

from prfaas.cli.common.signals import StoppedEarlyError, run_until_stopped
from prfaas.cli.deploy.demo_table import DemoRequest, DemoRow, demo_requests, table_of
from prfaas.cli.deploy.topology import Topology
from prfaas.cli.deploy.up_command import console, running
from prfaas.cli.parts.gateway_command import listen_on
from prfaas.config.clusters import ClusterRole
from prfaas.config.load import load_deployment
from prfaas.errors import ConfigError, EngineError
from prfaas.units import format_size

EXAMPLE = Path("examples/laptop.toml")
"""Default deployment file, in a checkout."""
OUTPUT_TOKENS = 32
NUM_REMOTE_MIN = 4
RECORD_WAIT_S = 5.0

JsonObject = dict[str, Any]


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=EXAMPLE)
def demo(file: Path) -> None:
    """Two clusters on this machine, and twelve requests with the reason for each path.

    Runs the deployment in FILE, sends chat turns and documents of real text, and gets the same
    answers from a single engine, first with an empty cache, then with the prompt's prefix cached.
    Exit code 0 if all twelve equal one of these and at least four were prefilled in the PrfaaS
    cluster.

    \b
    Examples:
      prfaas demo
      prfaas demo examples/laptop.toml
    """
    if file == EXAMPLE and not file.exists():
        raise ConfigError(
            f"there is no {EXAMPLE} here; run this in a checkout of prfaas, or name a deployment "
            "file: prfaas demo FILE"
        )
    outcome: list[bool] = []

    async def run(stop: asyncio.Event) -> None:
        deployment = listen_on(load_deployment(file), ("127.0.0.1", 0))
        async with running(deployment, file, stop) as (topology, _):
            work = asyncio.create_task(_run(topology))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                raise StoppedEarlyError
            outcome.append(work.result())

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

            await _serve_all(session, topology, rows, show)
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


async def _serve_all(
    session: aiohttp.ClientSession,
    topology: Topology,
    rows: list[DemoRow],
    show: Callable[[], None],
) -> None:
    answers: list[DemoRow] = []
    for number, request in enumerate(demo_requests()):
        row = DemoRow(request, _messages(request, answers))
        rows.append(row)
        show()
        request_id = f"demo-{number + 1:02}-{secrets.token_hex(4)}"
        row.answer = await _stream(session, topology, row.messages, request_id)
        row.record = await _record(session, topology, request_id)
        answers.append(row)
        show()


def _messages(request: DemoRequest, earlier: list[DemoRow]) -> list[JsonObject]:
    """The conversation so far, and the new turn."""
    history: list[JsonObject] = []
    if request.follows is not None:
        before = earlier[request.follows]
        history = [*before.messages, {"role": "assistant", "content": before.answer}]
    return [*history, {"role": "user", "content": request.text}]


def _body(topology: Topology, messages: list[JsonObject]) -> JsonObject:
    return {
        "model": topology.deployment.model.name,
        "messages": messages,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
    }


async def _stream(
    session: aiohttp.ClientSession, topology: Topology, messages: list[JsonObject], request_id: str
) -> str:
    """Ask the gateway, streamed, as a client would."""
    url = f"{topology.gateway_url}/v1/chat/completions"
    body = _body(topology, messages) | {"stream": True}
    async with session.post(url, json=body, headers={"X-Request-Id": request_id}) as reply:
        if reply.status != 200:
            raise EngineError(f"the gateway answered {reply.status}: {await reply.text()}")
        return await streamed_text(reply)


async def streamed_text(reply: aiohttp.ClientResponse) -> str:
    """Text of a streamed answer; EngineError if the stream has an error."""
    pieces: list[str] = []
    async for line in reply.content:
        field, _, value = line.decode().partition(":")
        data = value.strip()
        # A comment, sent while the stream waits, has no field name.
        if field == "data" and data != "[DONE]":
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(f"the stream broke: {chunk['error']}")
            pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    return "".join(pieces)


async def _record(
    session: aiohttp.ClientSession, topology: Topology, request_id: str
) -> JsonObject:
    """Return the gateway's record of a request after it and its transfer have ended."""
    deadline = time.monotonic() + RECORD_WAIT_S
    while True:
        url = f"{topology.gateway_url}/control/requests/{request_id}"
        async with session.get(url) as reply:
            record: JsonObject = await reply.json()
        pending = record.get("outcome") == "running" or record.get("transfer_state") == "open"
        if not pending or time.monotonic() > deadline:
            return record
        await asyncio.sleep(0.02)


async def _ask_alone(
    session: aiohttp.ClientSession, topology: Topology, row: DemoRow, salt: str
) -> str:
    """The same request to a single engine; its cache has only blocks with this salt."""
    cluster = topology.deployment.with_role(ClusterRole.PD)[0]
    url = f"{topology.engines[next(iter(cluster.engines))]}/v1/chat/completions"
    body = _body(topology, row.messages) | {"cache_salt": salt}
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
