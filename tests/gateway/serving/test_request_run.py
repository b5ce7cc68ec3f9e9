"""State that a finished request leaves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from prfaas.gateway.serving.request_run import RequestRun
from tests.gateway.conftest import World, until
from tests.gateway.prompts import LONG
from tests.gateway.scripted_engine import refuse


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_refers_to_a_request_that_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: bool, stream: bool
) -> None:
    """It has the prompt, and transfers and timers outlive it: no cycle may keep it."""
    runs: list[weakref.ref[RequestRun]] = []
    begin = RequestRun.__init__

    def noted(self: RequestRun, *args: Any) -> None:
        begin(self, *args)
        runs.append(weakref.ref(self))

    monkeypatch.setattr(RequestRun, "__init__", noted)
    world.prefill.script = refuse(500) if fails else None
    body = {"prompt": LONG, "max_tokens": 3, "stream": stream}
    gc.collect()
    gc.disable()
    try:
        async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()
        [run] = runs
        await until(lambda: run() is None)
    finally:
        gc.enable()
