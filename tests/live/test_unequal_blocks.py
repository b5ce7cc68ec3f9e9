"""Sites whose block sizes differ: prefill with one, decode with another, and the same tokens.

A plain model to larger blocks and a hybrid to smaller ones run for each change; the other two
directions with `-m nightly`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from prfaas.cli.deploy.topology import parts
from prfaas.planner.model.hf_config import geometry_from_config
from prfaas.planner.model.kv_geometry import LayerKind, page_bytes
from tests.deployments import LAPTOP, ROOT, laid_out, placed, started
from tests.engines.vllm_modules import needing_vllm
from tests.live.conftest import Live, until
from tests.live.model_kinds import KINDS, STATE_KIND, make_kind
from tests.live.relay import Relay

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]
PLAIN = next(iter(KINDS))
GIVEN = ', "--block-size", "384"'


def arranged(kind: str, local: Path, sizes: tuple[int, int], tokens: int, dtype: str) -> Path:
    """A deployment file whose PrfaaS and PD engines have these block sizes, without KV events."""
    file, _ = placed(LAPTOP, local)
    kept = [line for line in file.read_text().splitlines() if not line.startswith("kv_events")]
    text = "\n".join(kept).replace("generate = true        #", f"block_tokens = {tokens} #")
    for size in sizes:
        text = text.replace(GIVEN, f', "--block-size", "{size}", "--dtype", "{dtype}"', 1)
    file.write_text(text)
    make_kind(kind, local / "model")
    return file


@asynccontextmanager
async def deployment(file: Path) -> AsyncIterator[Live]:
    topology = await laid_out(file)
    async with started(parts(topology)) as supervisor, aiohttp.ClientSession() as http:
        live = Live(topology, supervisor, Relay(topology.pools["pd-pool"]), http)
        await until(lambda: _is_ready(live))
        yield live


async def _is_ready(live: Live) -> bool:
    async with live.http.get(f"{live.url}/health?full=1") as reply:
        return reply.status == 200


def planned_bytes(live: Live, num_tokens: int, tokens: int, dtype: str) -> int:
    """The planner's bytes of whole blocks and one state of every linear layer."""
    config = json.loads((Path(live.topology.deployment.model.path) / "config.json").read_text())
    geometry = geometry_from_config(config, kv_dtype=dtype, state_dtype="float32")
    num_blocks = (num_tokens - 1) // tokens
    return sum(
        group.num_layers
        * (
            group.state_bytes
            if group.kind is LayerKind.LINEAR
            else num_blocks * page_bytes(group, tokens)
        )
        for group in geometry.groups
    )


async def check_prompt(
    live: Live, num_chars: int, tokens: int, dtype: str, num_states: int = 0
) -> None:
    """The prompt is prefilled remotely, its blocks are loaded, and the answer is one engine's."""
    text = f"[{num_chars}] " + (ROOT / "LICENSE").read_text()
    body: dict[str, object] = {
        "model": live.model,
        "prompt": text[:num_chars],
        "max_tokens": 64,
        "temperature": 0,
    }
    pd_pool, name = live.pool_admin("pd-pool"), "prfaas_pool_blocks_loaded_total"
    before = await live.metric(pd_pool, name)
    async with live.http.post(f"{live.url}/v1/completions", json=body) as reply:
        answer, headers = await reply.json(), reply.headers
        assert reply.status == 200, answer
    record = await live.record(headers["X-Request-Id"])
    assert (record["path"], record["fallback"]) == ("remote", None)
    num_tokens = answer["usage"]["prompt_tokens"]
    num_blocks = (num_tokens - 1) // tokens
    assert await live.metric(pd_pool, name) - before == num_blocks + num_states
    assert record["kv_bytes"] == planned_bytes(live, num_tokens, tokens, dtype)
    url = f"{live.topology.engines['pd-engine']}/v1/completions"
    async with live.http.post(url, json=body | {"cache_salt": f"alone {num_chars}"}) as reply:
        alone = await reply.json()
        assert reply.status == 200, alone
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]

    # Asked again, the decode site has the prefix: its own index names it by the shared length.
    async with live.http.post(f"{live.url}/v1/completions", json=body) as reply:
        again, headers = await reply.json(), reply.headers
        assert reply.status == 200, again
    assert headers["X-Prfaas-Path"] == "local"
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_blocks * tokens <= cached < num_tokens
    assert again["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        pytest.param((32, 96), 192, id="32 to 96"),
        pytest.param((128, 64), 128, id="128 to 64", marks=pytest.mark.nightly),
    ],
)
async def test_a_plain_model_is_handed_over_between_block_sizes(
    tmp_path: Path, sizes: tuple[int, int], tokens: int
) -> None:
    file = arranged(PLAIN, tmp_path, sizes, tokens, "float32")
    async with deployment(file) as live:
        for num_chars in (1700, 2305, 5000):
            await check_prompt(live, num_chars, tokens, "float32")


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((384, 768), id="384 to 768", marks=pytest.mark.nightly),
        pytest.param((768, 384), id="768 to 384"),
    ],
)
async def test_a_hybrid_is_handed_over_between_block_sizes(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """States travel at boundaries that both sites can resume from."""
    _needing_vector_code()
    local = tmp_path / "linear"
    local.mkdir()
    file = arranged(STATE_KIND, local, sizes, 768, "bfloat16")
    async with deployment(file) as live:
        for num_chars in (1700, 2305, 2690, 5000):
            await check_prompt(live, num_chars, 768, "bfloat16", num_states=3)


def _needing_vector_code() -> None:
    backend = needing_vllm("vllm.v1.attention.backends.cpu_attn")
    torch = needing_vllm("torch")
    code = backend._get_attn_isa(torch.bfloat16, 384, 64)
    if code != "vec":
        pytest.skip(f"vLLM's {code} code orders keys so that blocks cannot be combined")
