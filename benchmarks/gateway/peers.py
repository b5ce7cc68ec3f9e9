"""Other projects' routers, and the engines they stand before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.ports import free_port

from .systems import (
    BLOCK_TOKENS,
    MODEL,
    OTHER_CORE,
    ROUTER_CORE,
    System,
    answers,
    process,
)

KV_AWARE = ["--policy", "kv_aware", "--kv-event-model", MODEL]
ROUTERS = {
    "sglang-router": ["sglang-router", "launch", "--policy", "cache_aware"],
    "vllm-router": ["vllm-router", "--policy", "cache_aware"],
    "vllm-router kv_aware": ["vllm-router", *KV_AWARE, "--kv-event-block-size", str(BLOCK_TOKENS)],
}
"""All but addresses."""
FAST = ["--speedup-ratio", "1e6", "--max-num-batched-tokens", "200000"]
"""A prompt is one step, and steps take nothing. 0 is no speed-up without limit: steps take 6 ms."""
HELD = [
    *("--speedup-ratio", "1000", "--decode-speedup-ratio", "1e-5"),
    *("--max-num-seqs", "4096", "--max-num-batched-tokens", "1000000"),
]
"""Prompts cost nothing, steps take over a second, and all streams fit into one."""


class Peer(Protocol):
    """A router that can be started."""

    def serving(self, local: Path, engines: dict[str, str]) -> AbstractAsyncContextManager[System]:
        """The router before engines, given as URLs and where they publish; or before its own."""

    def holding(self, local: Path, url: str) -> AbstractAsyncContextManager[System]:
        """The router before an engine whose streams do not end."""


def peers(routers: Path | None, dynamo: Path | None) -> list[Peer]:
    """Routers that these environments contain."""
    found: list[Peer] = []
    for name, (program, *args) in ROUTERS.items():
        if routers and (routers / "bin" / program).exists():
            command = [str(routers / "bin" / program), *args]
            found.append(HttpRouter(name, command, "kv_aware" in args))
    if dynamo:
        found.append(Dynamo(str(dynamo / "bin" / "python")))
    return found


@dataclass
class HttpRouter:
    """A router before engines that speak vLLM's HTTP.

    Attributes:
        name: For the table.
        command: Without addresses.
        on_events: Whether it hears KV events.
    """

    name: str
    command: list[str]
    on_events: bool

    @asynccontextmanager
    async def serving(self, _local: Path, engines: dict[str, str]) -> AsyncIterator[System]:
        """See `Peer`."""
        port, metrics = free_port(), free_port()
        command = [*self.command, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", *engines, "--prometheus-port", str(metrics)]
        for url, where in engines.items() if self.on_events else ():
            command += ["--kv-event-source", f"{url}={where}"]
        async with process(ROUTER_CORE, *command) as pid:
            await answers(port)
            yield System(self.name, port, [pid])

    def holding(self, local: Path, url: str) -> AbstractAsyncContextManager[System]:
        """See `Peer`; nobody publishes events."""
        return self.serving(local, {url: f"tcp://127.0.0.1:{free_port()}"})


@dataclass
class Dynamo:
    """Dynamo's frontend, which tokenises, hashes and looks up, before Dynamo's mock engines.

    Attributes:
        python: Of the environment it is installed in.
    """

    python: str

    @asynccontextmanager
    async def serving(self, local: Path, _engines: dict[str, str]) -> AsyncIterator[System]:
        """See `Peer`."""
        async with self._before(local, FAST) as system:
            yield system

    @asynccontextmanager
    async def holding(self, local: Path, _url: str) -> AsyncIterator[System]:
        """See `Peer`; the streams end, but only after twenty seconds."""
        async with self._before(local, HELD) as system:
            yield system

    @asynccontextmanager
    async def _before(self, local: Path, times: list[str]) -> AsyncIterator[System]:
        port, here = free_port(), local / "dynamo"
        here.mkdir(exist_ok=True)
        # A model is called by its path, so the path has to be its name.
        if not (here / MODEL).exists():
            (here / MODEL).symlink_to(local / "model")
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
