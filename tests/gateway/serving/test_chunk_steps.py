"""Python instructions for an event of a stream: most of what a gateway does is done for each."""

from __future__ import annotations

import json
from typing import Any

from prfaas.gateway.http.responses import DONE_EVENT, EventReader
from prfaas.gateway.openai.requests import Api, parse_request
from prfaas.gateway.serving.decode_leg import next_event, relay_events
from prfaas.gateway.serving.request_state import Exchange, StreamedAnswer
from prfaas.gateway.telemetry.request_records import RequestRecord
from tests.instructions import counted

NUM_EVENTS, TOGETHER = 64, 8
INSTRUCTIONS_MAX = 480


class Client:
    """The stream to a client."""

    def __init__(self) -> None:
        self.num_events = 0

    def put(self, _: object) -> None:
        self.num_events += 1

    async def flush(self) -> None: ...


class Content:
    """The body of an engine's answer, all of which has come."""

    def __init__(self) -> None:
        starts = range(0, NUM_EVENTS, TOGETHER)
        self._parts = [b"".join(map(chunk, range(n, n + TOGETHER))) for n in starts]
        self._parts.append(DONE_EVENT)

    async def readany(self) -> bytes:
        return self._parts.pop(0)


def chunk(token: int) -> bytes:
    choice = {"index": 0, "text": "a", "finish_reason": None, "token_ids": [token]}
    made = {"id": "1", "created": 1, "model": "m", "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(made).encode()


def test_events_that_come_together() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
    client, nobody = Client(), None
    parts: Any = (parse_request(json.dumps(body).encode(), Api.CHAT, "m", 100), nobody)
    parts += (RequestRecord("id", "chat", "tenant"), client, nobody, nobody)
    exchange = Exchange(*parts)
    exchange.answer = StreamedAnswer([])

    async def relayed() -> None:
        reader = EventReader(content)
        await relay_events(reader, await next_event(reader), exchange)

    content: Any = Content()
    _, num_instructions = counted(lambda: _run(relayed()))
    assert num_instructions < INSTRUCTIONS_MAX * NUM_EVENTS
    assert client.num_events == 1 + NUM_EVENTS


def _run(coroutine: Any) -> None:
    """Run what waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")
