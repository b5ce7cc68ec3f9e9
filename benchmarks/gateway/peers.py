"""Other projects' routers, and the engines they stand before."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .systems import (
    BLOCK_TOKENS,
    CACHE_TOKENS,
    MODEL,
    OTHER_CORE,
    PLAN,
    ROUTER_CORE,
    SCALE,
    System,
    answers,
    free_port,
    process,
)

TEXT_ROUTERS = {
    "sglang-router": ["launch", "--policy", "cache_aware"],
    "vllm-router": ["--policy", "cache_aware"],
}
FAST = ["--speedup-ratio", "0"]
HELD = [
    *("--speedup-ratio", "1000", "--decode-speedup-ratio", "1e-5"),
    *("--max-num-seqs", "4096", "--max-num-batched-tokens", "1000000"),
]
"""Prompts cost nothing, steps take over a second, and all streams fit into one."""


class Peer(Protocol):
    """A router that can be started."""

    def serving(self, home: Path, urls: list[str]) -> AbstractAsyncContextManager[System]:
        """The router before engines at these URLs, or before equal ones of its own."""

    def holding(self, home: Path, url: str) -> AbstractAsyncContextManager[System]:
        """The router before an engine whose streams do not end."""


def peers(routers: Path | None, dynamo: Path | None) -> list[Peer]:
    """What these environments hold."""
    found: list[Peer] = []
    if routers:
        for name, args in TEXT_ROUTERS.items():
            if (routers / "bin" / name).exists():
                found.append(TextRouter(name, [str(routers / "bin" / name), *args]))
        if (routers / "bin" / "vllm-router").exists():
            found.append(KvAwareRouter(str(routers / "bin" / "vllm-router")))
    if dynamo:
        found.append(Dynamo(str(dynamo / "bin" / "python")))
    return found


@dataclass
class TextRouter:
    """A router that looks at the text of prompts.

    Attributes:
        name: For the table.
        command: Without addresses.
    """

    name: str
    command: list[str]

    @asynccontextmanager
    async def serving(self, _home: Path, urls: list[str]) -> AsyncIterator[System]:
        """See `Peer`."""
        async with router(self.name, self.command, urls) as system:
            yield system

    def holding(self, home: Path, url: str) -> AbstractAsyncContextManager[System]:
        """See `Peer`."""
        return self.serving(home, [url])


@dataclass
class KvAwareRouter:
    """vllm-router on KV events: it has engines tokenise, hashes the tokens and looks them up.

    Attributes:
        program: The router.
    """

    program: str

    @asynccontextmanager
    async def serving(self, home: Path, _urls: list[str]) -> AsyncIterator[System]:
        """See `Peer`; the engines are of the same kind, and publish events."""
        ports = [free_port(), free_port()]
        events = {f"http://127.0.0.1:{port}": tcp(free_port()) for port in ports}
        command = [sys.executable, "-m", "prfaas", "engine", "timing"]
        command += ["--plan", str(PLAN), "--model", MODEL, "--model-path", f"{home}/model"]
        command += ["--time-scale", str(SCALE), "--bytes-scale", str(SCALE)]
        command += ["--block-tokens", str(BLOCK_TOKENS), "--cache-tokens", str(CACHE_TOKENS)]
        for port, where in zip(ports, events.values(), strict=True):
            command += ["--engine", f"e{port}=127.0.0.1:{port}", "--kv-events", f"e{port}={where}"]
        async with process(OTHER_CORE, *command):
            for port in ports:
                await answers(port)
            async with self._before(events) as system:
                yield system

    @asynccontextmanager
    async def holding(self, _home: Path, url: str) -> AsyncIterator[System]:
        """See `Peer`; nobody publishes events."""
        async with self._before({url: tcp(free_port())}) as system:
            yield system

    @asynccontextmanager
    async def _before(self, events: dict[str, str]) -> AsyncIterator[System]:
        command = [self.program, "--policy", "kv_aware", "--kv-event-model", MODEL]
        command += ["--kv-event-block-size", str(BLOCK_TOKENS)]
        for url, where in events.items():
            command += ["--kv-event-source", f"{url}={where}"]
        async with router("vllm-router kv_aware", command, list(events)) as system:
            yield system


@dataclass
class Dynamo:
    """Dynamo's frontend, which tokenises, hashes and looks up, before Dynamo's mock engines.

    Attributes:
        python: Of the environment it is installed in.
    """

    python: str

    @asynccontextmanager
    async def serving(self, home: Path, _urls: list[str]) -> AsyncIterator[System]:
        """See `Peer`."""
        async with self._before(home, FAST) as system:
            yield system

    @asynccontextmanager
    async def holding(self, home: Path, _url: str) -> AsyncIterator[System]:
        """See `Peer`; the streams end, but only after twenty seconds."""
        async with self._before(home, HELD) as system:
            yield system

    @asynccontextmanager
    async def _before(self, home: Path, times: list[str]) -> AsyncIterator[System]:
        port, here = free_port(), home / "dynamo"
        here.mkdir(exist_ok=True)
        # A model is called by its path, so the path has to be its name.
        if not (here / MODEL).exists():
            (here / MODEL).symlink_to(home / "model")
        env = {"HOME": str(here), "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
        env |= {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": f"{here}/found-{port}"}
        env |= {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        env |= {"DYN_TCP_RPC_HOST": "127.0.0.1"}
        engines = [self.python, "-m", "dynamo.mocker", "--model-path", MODEL, "--num-workers", "2"]
        engines += ["--block-size", str(BLOCK_TOKENS), *times]
        front = [self.python, "-m", "dynamo.frontend", "--router-mode", "kv"]
        front += ["--tokenizer", "fastokens"]
        front += ["--http-host", "127.0.0.1", "--http-port", str(port)]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(process(OTHER_CORE, *engines, cwd=here, env=env))
            pid = await stack.enter_async_context(process(ROUTER_CORE, *front, cwd=here, env=env))
            await answers(port)
            yield System("Dynamo", port, [pid], own_engines=True)


@asynccontextmanager
async def router(name: str, command: list[str], urls: list[str]) -> AsyncIterator[System]:
    """A router before engines that speak vLLM's HTTP."""
    port, metrics = free_port(), free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    command += ["--prometheus-port", str(metrics)]
    async with process(ROUTER_CORE, *command) as pid:
        await answers(port)
        yield System(name, port, [pid])


def tcp(port: int) -> str:
    """An address of ZeroMQ's on this machine."""
    return f"tcp://127.0.0.1:{port}"
