"""Two clusters without a model: scripted engines, scripted pools, a real gateway between them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from prfaas.cli.parts.gateway_annexes import GatewayAnnexes, make_gateway
from prfaas.config.addresses import Endpoints
from prfaas.config.deployment import Deployment
from prfaas.core.kv.blocks import BlockKey, CacheGroup, GroupKind, Layout
from prfaas.core.kv.naming.hash_chain import hash_chain
from prfaas.core.kv.tenant_salts import salt_of
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.app import Gateway
from prfaas.gateway.pools.pool_client import PoolTiming
from prfaas.gateway.tenancy.tenants import DEFAULT_NAME
from prfaas.gateway.times import TIMES, Times
from tests.otlp import Collector, collecting

from .scripted_engine import ScriptedEngine
from .scripted_pool import ScriptedPool

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | length }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THRESHOLD = 100
LAYOUT = Layout(
    layout_id=b"L" * 32,
    tokens_per_hash=16,
    hash_seed="7",
    groups=(
        CacheGroup(0, GroupKind.FULL_ATTENTION, 16, 1024),
        CacheGroup(1, GroupKind.LINEAR_STATE, 64, 2048),
    ),
)
TIMING = PoolTiming(backoff_s=0.01, backoff_max_s=0.05)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a ChatML template."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def make_checkpoint(path: Path) -> Path:
    """Write it to a folder, and return the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    return path


@dataclass
class World:
    """Everything around one gateway."""

    gateway: Gateway
    url: str
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI
    prefill: ScriptedEngine
    decode: ScriptedEngine
    spare: ScriptedEngine
    prfaas_pool: ScriptedPool
    pd_pool: ScriptedPool
    state: Path
    others: tuple[ScriptedEngine, ...] = ()
    """Further engines of the PrfaaS cluster."""

    @property
    def salt(self) -> str:
        return salt_of(deployment_secret(self.state), DEFAULT_NAME)

    def hashes(self, ids: list[int]) -> list[bytes]:
        return hash_chain(ids, tokens_per_hash=16, seed="7", cache_salt=self.salt)

    def keys(self, ids: list[int], num_tokens: int) -> list[BlockKey]:
        """Names of all blocks that make up a usable prefix of `num_tokens`."""
        hashes = self.hashes(ids)
        attention = [BlockKey(0, hashes[end // 16 - 1]) for end in range(16, num_tokens + 1, 16)]
        return [*attention, BlockKey(1, hashes[num_tokens // 16 - 1])]

    async def metric(self, sample: str) -> float:
        """Value of one sample line, 0 if there is none."""
        async with self.http.get(f"{self.url}/metrics") as response:
            text = await response.text()
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    async def record(self, index: int = 0) -> dict[str, Any]:
        async with self.http.get(f"{self.url}/control/requests") as response:
            record: dict[str, Any] = (await response.json())["requests"][index]
            return record

    async def post(self, body: object, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` holds; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the conditions are attributes, nobody signals them
        await asyncio.sleep(0.001)


def children() -> set[int]:
    """Processes that this one's first thread has started."""
    pid = os.getpid()
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def deployment_for(checkpoint: Path, identities: Path, state: Path, **tables: Any) -> Deployment:
    return Deployment.model_validate(
        {
            "model": {"name": "tiny", "path": str(checkpoint), **tables.get("model", {})},
            "gateway": {"listen": "127.0.0.1:0", "lame_duck": "0s", **tables.get("gateway", {})},
            "routing": {"offload_threshold": THRESHOLD, **tables.get("routing", {})},
            "security": {"identities": str(identities)},
            "state": str(state),
            "tenants": tables.get("tenants", {}),
            "tracing": tables.get("tracing"),
            "audit": tables.get("audit"),
            "operators": tables.get("operators", {}),
            "classes": tables.get("classes", {}),
            "prices": tables.get("prices", {}),
            "clusters": {
                "prfaas": {
                    "role": "prfaas",
                    "pools": {"prfaas-pool": {}},
                    "engines": {
                        "prefill": {"pool": "prfaas-pool", "cpus": "0", **tables.get("remote", {})},
                        **{
                            name: {"pool": "prfaas-pool", "cpus": "0"}
                            for name in tables.get("others", ())
                        },
                    },
                },
                "pd": {
                    "role": "pd",
                    "pools": {"pd-pool": {}},
                    "engines": {
                        name: {
                            "pool": "pd-pool",
                            "cpus": "1",
                            **tables.get("engines", {}).get(name, {}),
                        }
                        for name in dict.fromkeys(("decode", "spare", *tables.get("engines", {})))
                    },
                },
            },
        }
    )


@asynccontextmanager
async def running(
    checkpoint: Path, identities: Path, state: Path, **tables: Any
) -> AsyncIterator[World]:
    """A world in which all is well, except that the spare decode engine is down."""
    engines = [ScriptedEngine(name) for name in ("prefill", "decode", "spare")]
    prefill, decode, spare = engines
    spare.healthy = False
    others = tuple(ScriptedEngine(name) for name in tables.get("others", ()))
    engines += others
    layout = tables.get("layout", LAYOUT)
    remote = {engine.name: layout for engine in (prefill, *others)}
    prfaas_pool = ScriptedPool("prfaas-pool", identities, remote, {"pd-pool": True})
    pd_pool = ScriptedPool("pd-pool", identities, {"decode": layout, "spare": layout})
    parts: list[ScriptedEngine | ScriptedPool] = [*engines, prfaas_pool, pd_pool]
    for part in parts:
        await part.start()
    gateway = make_gateway(
        deployment_for(checkpoint, identities, state, **tables),
        Endpoints(
            engines={engine.name: engine.url for engine in engines},
            pools={pool.name: ("127.0.0.1", pool.port) for pool in (prfaas_pool, pd_pool)},
        ),
        poll_s=tables.get("poll_s", 0.02),
        timing=TIMING,
        times=tables.get("times", TIMES),
    )
    url = await gateway.start()
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with aiohttp.ClientSession() as http, client:
        world = World(
            gateway, url, http, client, prefill, decode, spare, prfaas_pool, pd_pool, state, others
        )
        await until(lambda: is_well(world))
        try:
            yield world
            for checked in (gateway.engines, gateway.pools, gateway.connections):
                checked.validate()
        finally:
            await gateway.close()
            for part in parts:
                await part.stop()


def annexes_of(world: World) -> GatewayAnnexes:
    """The annexes of the gateway."""
    [found] = world.gateway.annexes
    assert isinstance(found, GatewayAnnexes)
    return found


def is_well(world: World) -> bool:
    """Both clusters are ready for a transfer."""
    engines, pools = world.gateway.engines.by_name, world.gateway.pools
    announced = pools.layout("pd-pool", "decode") and pools.layout("prfaas-pool", "prefill")
    needed = ("prefill", "decode", *(other.name for other in world.others))
    ready = all(engines[name].is_ready for name in needed)
    return bool(ready and announced and pools.link_up("prfaas-pool", "pd-pool"))


@pytest.fixture
def times() -> Times:
    """Times of the gateway; a test may give others."""
    return TIMES


@pytest.fixture
async def world(
    checkpoint: Path, identities: Path, tmp_path: Path, times: Times
) -> AsyncIterator[World]:
    async with running(checkpoint, identities, tmp_path / "state", times=times) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    async with collecting() as made:
        yield made
