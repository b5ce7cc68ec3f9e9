"""SGLang's names, a served model, and a pool node with its event loop on a thread."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from prfaas.engines.pool_client import ClientLimits
from prfaas.engines.sglang import facts
from prfaas.pool.process.process import PoolProcessSettings
from prfaas.wire.identity import identity_in
from prfaas.wire.messages.gateway import OrderDone
from tests.engines.sglang import names
from tests.engines.sglang.host_pools import HostPool
from tests.orders import purge, purge_end
from tests.pool.sites import LOOPBACK, Site, subscribe, until

T = TypeVar("T")
MEMORY = 1 << 20
LIMITS = ClientLimits(retry_s=0.01)
PATIENCE_S = 30.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Files of a model."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def context(checkpoint: Path) -> names.Context:
    """The configuration of a server."""
    return names.Context(
        model=names.Bag(model_path=str(checkpoint), revision=None, download_dir=None, dtype="auto"),
        exec=names.Bag(attention_backend="fa3", moe=names.Bag(moe_runner_backend="auto")),
        spec=names.Bag(speculative_algorithm=None),
        lora=names.Bag(enable_lora=False),
        mm=names.Bag(),
        serving=names.Bag(weight_version="default"),
    )


@pytest.fixture
def backend(context: names.Context, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend, with SGLang's names below it."""
    names.install(context)
    monkeypatch.setattr(facts, "metadata", SimpleNamespace(version=lambda _: facts.VERSIONS[0]))
    yield importlib.import_module(names.BACKEND)
    names.remove()


class PoolThread:
    """A pool node on a thread of its own, for engines that wait for answers."""

    def __init__(self, identities: Path, socket_path: Path, **settings: Any) -> None:
        self.socket_path, self._identities = socket_path, identities
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="pool-node", daemon=True
        )
        self._thread.start()
        self._settings: dict[str, Any] = {
            "name": "pd-pool",
            "memory_bytes": MEMORY,
            "listen": (LOOPBACK, 0),
            "socket_path": socket_path,
            "admin": (LOOPBACK, 0),
            "identity": identity_in(identities, "pd-pool"),
            "peers": {},
            "sources": frozenset(),
            "gateways": frozenset({"gateway"}),
        } | settings
        self.site: Site
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the pool node's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def restart(self) -> None:
        """Another pool node in the place of this one, without its blocks."""
        self.run(self.site.kill())
        self.run(self._start())

    def purge(self) -> None:
        """Drop all blocks, as a gateway has it done for the operator."""
        self.run(self._purge())

    def check(self) -> None:
        """Check the invariants of the idle node."""

        async def check() -> None:
            self.site.check()

        self.run(check())

    def num_blocks(self) -> int:
        """Blocks that the pool node holds."""

        async def count() -> int:
            return len(self.site.held())

        return self.run(count())

    def close(self) -> None:
        if self.site.is_running:
            self.run(self.site.kill())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _start(self) -> None:
        self.site = Site(PoolProcessSettings(**self._settings))
        await self.site.ready()

    async def _purge(self) -> None:
        gateway = await subscribe(self.site, self._identities)
        gateway.channel.send(purge(job=1, source="pd-pool"))
        await until(lambda: gateway.of(OrderDone))
        gateway.channel.send(purge_end(job=2, source="pd-pool"))
        await until(lambda: gateway.of(OrderDone))
        gateway.pinging.cancel()
        gateway.channel.close("purged")


@pytest.fixture
def pool_node(identities: Path, tmp_path: Path) -> Iterator[PoolThread]:
    node = PoolThread(identities, tmp_path / "pool.sock")
    yield node
    node.close()


def extra_config(socket_path: Path, **changes: Any) -> dict[str, Any]:
    """Settings that an operator gives SGLang."""
    return {
        "backend_name": "prfaas",
        "module_path": "prfaas.engines.sglang.backend",
        "class_name": "PrfaasStorage",
        "interface_v1": 1,
        "allocator": "shm",
        "prfaas_engine": "decode",
        "prfaas_pool": str(socket_path),
        "prfaas_wait_s": 20,
    } | changes


class Engines:
    """Starts backends as SGLang does, each with host pools of its own."""

    def __init__(self, module: Any, socket_path: Path) -> None:
        self._module, self._socket_path = module, socket_path
        self._made: list[Any] = []
        self._pools: list[HostPool] = []

    def start(
        self,
        pools: dict[str, HostPool] | None = None,
        config: dict[str, Any] | None = None,
        *,
        waits: bool = True,
        **extra: Any,
    ) -> Any:
        """A backend; its host pools are `backend.pools`."""
        pools = pools or {"kv": HostPool()}
        self._pools += pools.values()
        ranks = names.HiCacheStorageConfig(
            extra_config=extra_config(self._socket_path, **extra), **(config or {})
        )
        made = self._module.PrfaasStorage(ranks, {}, LIMITS)
        self._made.append(made)
        made.register_mem_pool_host(pools["kv"])
        for name, each in pools.items():
            made.register_mem_host_pool_v2(each, name)
        made.on_host_pools_registered()
        made.pools = pools
        if waits:
            wait(lambda: made.is_connected)
        return made

    def close(self) -> None:
        for made in self._made:
            made.close()
        for pool in self._pools:
            pool.close()


def wait(condition: Callable[[], object]) -> None:
    """Wait for what other threads do."""
    ended = threading.Event()
    for _ in range(round(PATIENCE_S / 0.005)):
        if condition():
            return
        ended.wait(0.005)
    raise AssertionError("it did not happen in time")


@pytest.fixture
def engines(backend: Any, tmp_path: Path) -> Iterator[Engines]:
    made = Engines(backend, tmp_path / "pool.sock")
    yield made
    made.close()
