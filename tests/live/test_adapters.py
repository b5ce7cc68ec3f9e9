"""Adapters of real engines: served at home, and their blocks mixed with nobody's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from prfaas.cli.deploy.topology import parts
from tests.deployments import LAPTOP, laid_out, placed, started
from tests.live.adapters import RANK, make_adapter
from tests.live.conftest import Live, document, until
from tests.live.model_kinds import make_kind
from tests.live.relay import Relay

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
KIND = "grouped queries (Llama)"
ADAPTERS = ("poet", "critic")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """Two clusters; the PD engine alone has adapters."""
    local = tmp_path_factory.mktemp("adapters")
    make_kind(KIND, local / "model")
    for seed, name in enumerate(ADAPTERS, 1):
        make_adapter(local / "model", local / name, seed)
    topology = await laid_out(*placed(LAPTOP, local, settings(local)))
    async with started(parts(topology)) as supervisor, aiohttp.ClientSession() as http:
        live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
        await until(lambda: _is_whole(live))
        yield live


def settings(local: Path) -> str:
    args = ["--max-num-batched-tokens", "2048"]
    lora = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules"]
    lora += [f"{name}={local / name}" for name in ADAPTERS]
    return (
        f"[clusters.prfaas.engines.prfaas-engine]\nargs = {json.dumps(args)}\n"
        f"[clusters.pd.engines.pd-engine]\nargs = {json.dumps(args + lora)}\n"
    )


async def _is_whole(live: Live) -> bool:
    async with live.http.get(f"{live.url}/health?full=1") as reply:
        return reply.status == 200


async def stored(live: Live) -> float:
    """Blocks that the PD pool node was ever given by its engine, or by a link."""
    admin = live.pool_admin("pd-pool")
    given = await live.metric(admin, "prfaas_pool_blocks_stored_total")
    return given + await live.metric(admin, "prfaas_pool_blocks")


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def test_adapters_are_listed_and_differ_from_the_model(adapted: Live) -> None:
    async with adapted.http.get(f"{adapted.url}/v1/models") as reply:
        names = [card["id"] for card in (await reply.json())["data"]]
    assert names == [adapted.model, *sorted(ADAPTERS)]
    answers = set()
    for model in (adapted.model, *ADAPTERS):
        text = document(400)
        answer, _ = await adapted.chat(text, model=model)
        assert answer["model"] == model
        assert text_of(answer) == await adapted.alone(text, f"short {model}", model=model)
        answers.add(text_of(answer))
    assert len(answers) == 3


async def test_blocks_of_an_adapter_are_never_anothers(adapted: Live) -> None:
    """One long prompt, for the model and both adapters in turn: remote, then at home."""
    text = "Adapt this. " + document(2500, start=300)
    answer, headers = await adapted.chat(text)
    assert headers["X-Prfaas-Path"] == "remote"
    expected = {
        model: await adapted.alone(text, f"long {model}", model=model)
        for model in (adapted.model, *ADAPTERS)
    }
    assert len(set(expected.values())) == 3
    assert text_of(answer) == expected[adapted.model]
    before = await stored(adapted)
    for model in ADAPTERS:
        cached = []
        for _ in range(2):
            answer, headers = await adapted.chat(text, model=model)
            where = headers["X-Prfaas-Path"], headers["X-Prfaas-Reason"]
            assert where == ("local", "not_offloadable")
            assert text_of(answer) == expected[model]
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0
        assert cached[1] > 1000
    assert await stored(adapted) == before
    answer, _ = await adapted.chat(text)
    assert text_of(answer) == expected[adapted.model]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
