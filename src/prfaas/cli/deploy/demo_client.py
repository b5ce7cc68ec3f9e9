"""Requests of the demos to a gateway, as a client sends them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from prfaas.cli.deploy.demo_table import DemoRequest, DemoRow
from prfaas.cli.deploy.topology import Topology
from prfaas.errors import EngineError

OUTPUT_TOKENS = 32
RECORD_WAIT_S = 5.0

JsonObject = dict[str, Any]


async def serve_all(
    session: aiohttp.ClientSession,
    topology: Topology,
    requests: Sequence[DemoRequest],
    rows: list[DemoRow],
    show: Callable[[], None],
) -> None:
    """Send the requests one after the other.

    Args:
        rows: Gets a row for each.
        show: Called when a row is new, and when its record is there.

    Raises:
        EngineError: A request was not answered.
    """
    answers: list[DemoRow] = []
    for number, request in enumerate(requests):
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


def body_of(topology: Topology, messages: list[JsonObject]) -> JsonObject:
    """Return the body of a request, but for whether it is streamed."""
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
    body = body_of(topology, messages) | {"stream": True}
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
