"""Engines forget what they hold, and know until then what it is of."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.cache.keep_rules import EVERY
from prfaas.engines.launch import FORGET_ROUTE
from prfaas.engines.lineage import Lineage
from prfaas.engines.vllm_forget import PATH, ForgetRoute
from prfaas.wire.messages.fields import SOURCES_MAX

NAMES = st.integers(0, 30)
SOURCES = st.frozensets(st.sampled_from("abc"), max_size=2)


@given(st.lists(st.tuples(st.frozensets(NAMES, max_size=5), SOURCES)), st.frozensets(NAMES))
def test_a_store_is_of_all_that_was_loaded_in_its_prompt(
    loads: list[tuple[frozenset[int], frozenset[str]]], prompt: frozenset[int]
) -> None:
    lineage: Lineage[int] = Lineage()
    for names, sources in loads:
        lineage.loaded(names, sources)
    expected = {s for names, sources in loads if names & prompt or not names for s in sources}
    assert lineage.sources(prompt) == sorted(expected)


@given(st.lists(st.tuples(st.frozensets(NAMES, max_size=5), SOURCES)), st.frozensets(NAMES))
def test_with_little_memory_it_says_too_much_and_never_too_little(
    loads: list[tuple[frozenset[int], frozenset[str]]], prompt: frozenset[int]
) -> None:
    whole, small = Lineage[int](), Lineage[int](loaded_max=3)
    for names, sources in loads:
        whole.loaded(names, sources)
        small.loaded(names, sources)
    assert set(whole.sources(prompt)) <= set(small.sources(prompt))
    small.forget()
    assert small.sources(prompt) == []


def test_what_no_name_tells_counts_for_every_prompt() -> None:
    lineage: Lineage[int] = Lineage()
    lineage.loaded([], [])
    assert lineage.sources([1]) == []
    lineage.loaded([], ["a"])
    assert lineage.sources([1]) == ["a"]


def test_too_many_sources_are_every_source() -> None:
    lineage: Lineage[int] = Lineage()
    for number in range(SOURCES_MAX + 1):
        lineage.loaded([1], [str(number)])
    assert lineage.sources([1, 2]) == [EVERY]


class Engine:
    """vLLM's client of an engine."""

    def __init__(self, answer: bool | Exception) -> None:
        self.answer = answer
        self.asked: list[dict[str, bool]] = []

    async def reset_prefix_cache(self, **how: bool) -> bool:
        self.asked.append(how)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def call(engine: Engine, path: str, method: str = "POST") -> tuple[int, Any]:
    """One request through the middleware; what lies behind it answers 418."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "path": path, "method": method, "app": app}
    await ForgetRoute(behind)(scope, None, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_the_route_has_the_engine_forget_everything() -> None:
    engine = Engine(answer=True)
    assert await call(engine, PATH) == (200, {"success": True})
    assert engine.asked == [{"reset_running_requests": True, "reset_connector": True}]


@pytest.mark.parametrize("answer", [False, RuntimeError("blocks are being loaded")])
async def test_an_engine_that_can_not_yet_is_asked_again(answer: bool | Exception) -> None:
    assert await call(Engine(answer), PATH) == (200, {"success": False})


@pytest.mark.parametrize(
    ("path", "method"), [(PATH, "GET"), ("/v1/completions", "POST"), ("/collective_rpc", "POST")]
)
async def test_the_route_passes_all_else_on(path: str, method: str) -> None:
    engine = Engine(answer=True)
    assert (await call(engine, path, method))[0] == 418
    assert engine.asked == []


def test_vllm_has_what_forgetting_is_made_of() -> None:
    """The names that `vllm_forget` and `PrfaasConnector.reset_cache` use, in the pinned vLLM."""
    llm = pytest.importorskip("vllm.v1.engine.async_llm")
    tiering = pytest.importorskip("vllm.v1.kv_offload.tiering.manager")
    connector = pytest.importorskip("prfaas.engines.vllm_connector").PrfaasConnector
    asked = inspect.signature(llm.AsyncLLM.reset_prefix_cache).parameters
    assert {"reset_running_requests", "reset_connector"} <= set(asked)
    manager = tiering.TieringOffloadingManager
    assert "self.secondary_tiers" in inspect.getsource(manager.__init__)
    assert "drain_jobs" in inspect.getsource(manager.reset_cache)
    assert "reset_cache" in vars(connector)
    module, _, name = FORGET_ROUTE.rpartition(".")
    assert (module, name) == (ForgetRoute.__module__, ForgetRoute.__name__)


def test_the_first_block_of_a_load_stands_for_the_others() -> None:
    base = pytest.importorskip("vllm.v1.kv_offload.base")
    job = pytest.importorskip("vllm.v1.kv_offload.tiering.base").TransferJob
    kind = pytest.importorskip("prfaas.engines.vllm_tier").PrfaasTier
    tier = kind.__new__(kind)
    tier._groups = {
        0: SimpleNamespace(tokens_per_block=16),
        1: SimpleNamespace(tokens_per_block=64),
    }
    ends = {0: [32, 48, 64], 1: [64, 72]}
    context = base.ReqContext(req_id="one")
    keys = {}
    for group, positions in ends.items():
        for end in positions:
            keys[group, end] = base.make_offload_key(bytes([end]) * 32, group)
            context.set_offload_key_position(keys[group, end], end)
    tail = keys[1, 72]
    unknown = base.make_offload_key(b"u" * 32, 0)
    for loaded, first in (
        (list(reversed(keys.values())), [keys[0, 32]]),
        ([tail, keys[1, 64], unknown], [keys[1, 64]]),
        ([tail], []),
        ([unknown], []),
    ):
        load = job(1, loaded, None, is_promotion=True, req_context=context)
        assert tier._first(load) == first
