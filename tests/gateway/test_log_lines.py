"""Log lines of requests: one line an event, with its request id."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from prfaas.logs import JsonFormatter

from .conftest import World, until
from .prompts import LONG
from .scripted_engine import refuse


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    return [line for line in lines if "event" in line]


async def test_a_request_and_its_fallback_are_a_line_each(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.prefill.script = refuse(500)
    headers = {"X-Request-Id": "r1"}
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
    async with world.http.post(f"{world.url}/v1/completions", json=body, headers=headers):
        pass
    await until(lambda: any(line["event"] == "request_ended" for line in events(caplog)))
    mine = [line for line in events(caplog) if line.get("request_id") == "r1"]
    assert [line["event"] for line in mine] == ["fell_back", "request_ended"]
    assert (mine[0]["stage"], mine[0]["reason"]) == ("prefill", "status_5xx")
    ended = mine[1]
    assert (ended["outcome"], ended["path"], ended["fallback"]) == (
        "finished",
        "remote",
        "prefill/status_5xx",
    )
    assert (ended["prompt_tokens"], ended["decode_engine"]) == (len(LONG), "decode")
    assert len(ended["transfer"]) == 32
    assert LONG not in caplog.text


async def test_an_error_says_whose_request_it_ended(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {"X-Request-Id": "r2"}
    async with world.http.post(f"{world.url}/v1/completions", json={}, headers=headers) as response:
        assert response.status == 400
    await until(lambda: any(line["event"] == "request_ended" for line in events(caplog)))
    mine = [line for line in events(caplog) if line.get("request_id") == "r2"]
    assert [line["event"] for line in mine] == ["request_refused", "request_ended"]
    assert mine[0]["status"] == 400
