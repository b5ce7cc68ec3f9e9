"""The workers of a gateway: started, watched, started again, and ended with it."""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as CounterMetric

from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError
from prfaas.gateway.api.completions import CompletionService
from prfaas.gateway.app import Gateway
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.http.connections import ClientConnections, Closed
from prfaas.logs import JsonFormatter, LogFormat, log_event
from prfaas.tasks import Backoff, cancel_all
from prfaas.workers import messages
from prfaas.workers.handing_on import behind
from prfaas.workers.messages import WorkerChannel
from prfaas.workers.remote_requests import RemoteRequests, WorkerDecodeLeg
from prfaas.workers.worker import PATH_BYTES, Start

_log = logging.getLogger(__name__)

SILENT_S = 15.0
"""A worker that says nothing for this time is ended, and another one started."""
LOOK_S = 1.0
"""Time between two looks for silent workers."""
READY_S = 120.0
"""Time for a worker to read a vocabulary and to listen."""
END_S = 5.0
"""Time for a worker to end by itself."""
BACKOFF_S, BACKOFF_MAX_S = 0.5, 10.0
"""Pauses before a worker is started again."""
LASTING_S = 60.0
"""After this time the next pause is the first one again."""


class WorkerMetrics:
    """Metrics of workers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_ready = Gauge(
            "prfaas_gateway_workers",
            "Processes that take requests of clients for this one",
            registry=registry,
        )
        self.ended = CounterMetric(
            "prfaas_gateway_workers_ended",
            "Workers that ended by themselves or hung, and were started again",
            registry=registry,
        )


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A process that becomes a worker: it reads a vocabulary until it is told where to listen, and
    ends if its channel is closed before."""

    process: Process
    channel: socket.socket


async def begin(deployment: Deployment) -> StartedWorker:
    """Start the process of a worker."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "prfaas.workers.worker"),
            stdin=PIPE,
            pass_fds=(theirs.fileno(),),
        )
        start = Start(deployment, theirs.fileno(), *_logging())
    out = process.stdin
    if out is None:
        raise RuntimeError("the worker has no input")
    out.write(pickle.dumps(start))
    out.close()
    with suppress(ConnectionError):
        await out.wait_closed()
    return StartedWorker(process, ours)


async def give_up(begun: StartedWorker) -> None:
    """End a process that is needed no more."""
    begun.channel.close()
    with suppress(ProcessLookupError):
        begun.process.kill()
    await begun.process.wait()


class _Worker:
    """One worker as the decider sees it."""

    def __init__(self, front: Workers) -> None:
        self._front = front
        self.channel = WorkerChannel(messages.OfWorker, self)
        self.requests: RemoteRequests = front.requests_for(self.channel.send)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heard_at = asyncio.get_running_loop().time()
        self.gone = asyncio.Event()
        self.process: Process | None = None
        self.num_open = 0
        self._closed: dict[str, int] = {}

    def take(self, message: Any) -> None:
        """Handle a message."""
        match message:
            case messages.Beat():
                self.heard_at = asyncio.get_running_loop().time()
                self.num_open = message.num_open
                self._front.count_closed(Counter(message.closed) - Counter(self._closed))
                self._closed = message.closed
                self.channel.send(messages.Answered())
                self._front.tell_facts()
            case messages.Ready():
                if not self.ready.done():
                    self.ready.set_result(None)
            case _:
                self.requests.take(message)

    @property
    def is_ready(self) -> bool:
        """Return True if it takes connections."""
        return self.ready.done() and not self.ready.cancelled()

    def lost(self) -> None:
        """It is gone: its requests end as if their clients had left."""
        self.num_open = 0
        self.gone.set()
        self._front.forget(self)

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Workers:
    """Takes the connections of a gateway's clients with several processes.

    Attributes:
        ready_s: Time for a worker to listen, seconds.

    Args:
        begun: Processes that are to be the first workers; those that it needs are taken out.
    """

    ready_s = READY_S

    def __init__(
        self, gateway: Gateway, metrics: WorkerMetrics, begun: list[StartedWorker]
    ) -> None:
        self.behind: Middleware = behind
        self._begun = begun
        self._gateway, self._metrics = gateway, metrics
        self._deployment = gateway.live.deployment
        leg = gateway.parts.decode_leg
        remote = WorkerDecodeLeg(leg.engines, leg.transfer_timeout_ms, gateway.engines)
        self._service: CompletionService = gateway.completions(
            replace(gateway.parts, decode_leg=remote)
        )
        self._workers: set[_Worker] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._facts = messages.PromptFacts()
        self._is_stopping = False
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self.on_closed: Callable[[Closed], None] = lambda _: None
        probes, pools = gateway.engines.probes, gateway.pools
        self._engine_changed, self._pool_changed = probes.on_change, pools.on_change
        probes.on_change, pools.on_change = self._note_engine, self._note_pool

    @property
    def num_open(self) -> int:
        """Connections of clients."""
        return sum(worker.num_open for worker in self._workers)

    async def serve(self, own: ClientConnections, listening: Sequence[int]) -> None:
        """Start the workers; see `gateway.app.Front`.

        Raises:
            ConfigError: One of them does not start.
        """
        self._gateway.metrics.watch_connections(self)
        # Private, and short enough for the path of a socket.
        self._folder = Path(tempfile.mkdtemp(prefix="prfaas-"))
        path = self._folder / "decider"
        self._server = await asyncio.get_running_loop().create_unix_server(own, str(path))
        started = [asyncio.get_running_loop().create_future() for _ in range(self._num_workers)]
        self._tasks = [
            asyncio.create_task(self._keep(path, tuple(listening), ready)) for ready in started
        ]
        self._tasks.append(asyncio.create_task(self._look()))
        try:
            await asyncio.gather(*started)
        except ConfigError:
            await self.stop(0.0)
            raise

    def renew(self) -> None:
        """Have the workers read their identity and certificate again."""
        for worker in self._ready:
            worker.signal(signal.SIGHUP)

    async def stop(self, seconds: float) -> None:
        """End the workers, and their requests after this time, seconds."""
        self._is_stopping = True
        for worker in self._workers:
            if worker.is_ready:
                worker.channel.send(messages.StopListening())
            else:
                worker.signal(signal.SIGKILL)
        await asyncio.gather(*(worker.requests.end(seconds) for worker in self._workers))
        # Their last messages are to be read before the channels close.
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.gather(*self._tasks[: self._num_workers], return_exceptions=True)
        for worker in self._workers:
            worker.signal(signal.SIGKILL)
        await cancel_all(self._tasks)
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _num_workers(self) -> int:
        return self._deployment.gateway.workers

    @property
    def _ready(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_ready]

    # Of one worker

    def requests_for(self, send: Callable[[messages.Message], None]) -> RemoteRequests:
        """Return the requests of a worker that is told of them by `send`."""
        gateway = self._gateway
        return RemoteRequests(self._service, gateway.request_admission, gateway.tenants, send)

    def forget(self, worker: _Worker) -> None:
        """A worker is gone."""
        self._workers.discard(worker)
        self._metrics.num_ready.set(len(self._ready))
        task = asyncio.create_task(worker.requests.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def count_closed(self, closed: Counter[str]) -> None:
        """Count connections that a worker has closed."""
        for why, num in closed.items():
            for _ in range(num):
                self.on_closed(Closed(why))

    async def _keep(
        self, path: Path, listening: tuple[int, ...], ready: asyncio.Future[None]
    ) -> None:
        """Keep one worker running."""
        backoff, loop = Backoff(BACKOFF_S, BACKOFF_MAX_S), asyncio.get_running_loop()
        while not self._is_stopping:
            began_at = loop.time()
            status = await self._run_one(path, listening, ready)
            if loop.time() - began_at > LASTING_S:
                backoff.reset()
            if not ready.done():
                said = f"a worker ended with status {status} before it was ready"
                if loop.time() - began_at >= self.ready_s:
                    said = f"a worker does not listen after {self.ready_s:g} s"
                ready.set_exception(ConfigError(f"{said}; see log"))
                return
            if self._is_stopping:
                return
            self._metrics.ended.inc()
            log_event(_log, logging.ERROR, "worker_ended", status=status)
            await backoff.pause()

    async def _run_one(
        self, path: Path, listening: tuple[int, ...], ready: asyncio.Future[None]
    ) -> int:
        worker, process, loop = _Worker(self), None, asyncio.get_running_loop()
        self._workers.add(worker)
        try:
            begun = self._begun.pop() if self._begun else await begin(self._deployment)
            worker.process = process = begun.process
            with suppress(OSError):  # It has ended, as its channel tells.
                told = str(path).encode().ljust(PATH_BYTES, b"\0")
                socket.send_fds(begun.channel, [told], listening)
            await loop.create_unix_connection(lambda: worker.channel, sock=begun.channel)
            if self._is_stopping:
                worker.signal(signal.SIGKILL)
            worker.ready.add_done_callback(lambda done: self._began(worker, done, ready))
            late = loop.call_later(self.ready_s, worker.signal, signal.SIGKILL)
            worker.ready.add_done_callback(lambda _: late.cancel())
            # A worker that has lost its channel is of no use, whatever became of it.
            await worker.gone.wait()
        finally:
            worker.ready.cancel()
            worker.channel.close()
            self._workers.discard(worker)
            status = 0 if process is None else await _end(process)
        return status

    def _began(
        self, worker: _Worker, done: asyncio.Future[None], ready: asyncio.Future[None]
    ) -> None:
        if done.cancelled():
            return
        self._metrics.num_ready.set(len(self._ready))
        self.tell_facts()
        worker.channel.send(self._facts)
        if not ready.done():
            ready.set_result(None)

    async def _look(self) -> None:
        """End workers that hang."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = asyncio.get_running_loop().time()
            for worker in [w for w in self._ready if now - w.heard_at > SILENT_S]:
                log_event(_log, logging.ERROR, "worker_hung", silent_s=round(now - worker.heard_at))
                worker.signal(signal.SIGKILL)

    # Facts

    def tell_facts(self) -> None:
        """Tell the workers what prompts are made with, if that has changed."""
        facts = self._now()
        if facts != self._facts:
            self._facts = facts
            for worker in self._workers:
                worker.channel.send(facts)

    def _now(self) -> messages.PromptFacts:
        gateway = self._gateway
        found = gateway.parts.planner.facts()
        if found is None:
            return messages.PromptFacts()
        layout, max_model_len = found
        return messages.PromptFacts(
            max_model_len,
            layout,
            gateway.engines.adapters(),
            gateway.rendering.is_own,
            gateway.rendering.takes_parts,
        )

    def _note_engine(self, engine: Engine, error: Exception | None) -> None:
        self._engine_changed(engine, error)
        self.tell_facts()

    def _note_pool(self, pool: str) -> None:
        self._pool_changed(pool)
        self.tell_facts()


async def _end(process: Process) -> int:
    """End a process, if it does not do so by itself; its status."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            return await process.wait()
    with suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


def _logging() -> tuple[LogFormat, int]:
    """Form and level of this process's log."""
    root = logging.getLogger()
    is_json = any(isinstance(each.formatter, JsonFormatter) for each in root.handlers)
    return LogFormat.JSON if is_json else LogFormat.TEXT, root.level
