"""The walk of a request: the modules that it is handed to, from its handler to its stream's end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from types import FrameType
from typing import Any

import pytest
from aiohttp import web

from prfaas.gateway.openai.requests import ClientRequest
from prfaas.gateway.serving.request_run import Legs, RequestRun
from prfaas.gateway.serving.request_state import Exchange
from prfaas.gateway.serving.routing_step import RoutedPrompt
from tests.gateway.conftest import World

REQUEST = (web.Request, ClientRequest, Exchange, RoutedPrompt, RequestRun, Legs)
COMPARES = "prfaas.gateway.tokenization.chat_renderer"
"""Meanwhile it sends chats of its own to engines that have become ready."""
IS_ASYNC = 0x80 | 0x200
"""Flags of coroutines and asynchronous generators: what is asked between is no visit."""
VISITS_MAX, RETURNS_MAX = 12, 3


@contextmanager
def walk() -> Iterator[list[str]]:
    """Modules of the asynchronous functions that get the request, or of its run, as argument."""
    modules: list[str] = []
    known: set[FrameType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event != "call" or not name.startswith("prfaas.") or not code.co_flags & IS_ASYNC:
            return
        if frame in known or name == COMPARES:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = [frame.f_locals[each] for each in names if each in frame.f_locals]
        owned = [value for each in found[:1] for value in getattr(each, "__dict__", {}).values()]
        if any(isinstance(each, REQUEST) for each in (*found, *owned)):
            known.add(frame)
            modules.append(name.removeprefix("prfaas."))

    sys.setprofile(note)
    try:
        yield modules
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("num_tokens", "path"), [(40, "local"), (150, "remote")])
async def test_a_request_visits_few_modules(world: World, num_tokens: int, path: str) -> None:
    body = {"model": "tiny", "prompt": [*range(1, num_tokens)], "max_tokens": 4, "stream": True}
    with walk() as modules:
        async with world.http.post(f"{world.url}/v1/completions", json=body) as response:
            await response.read()
    assert response.headers["X-Prfaas-Path"] == path
    begin = modules.index("gateway.api.completions")
    end = len(modules) - modules[::-1].index("gateway.http.responses")
    visits = [name for name, _ in groupby(modules[begin:end])]
    assert len(visits) <= VISITS_MAX, visits
    assert len(visits) - len(set(visits)) <= RETURNS_MAX, visits
