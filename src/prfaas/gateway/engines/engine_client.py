"""The engines: which are ready, and how requests are posted to them."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp

from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.resilience.circuit_breaker import Told
from prfaas.errors import EngineError
from prfaas.gateway.engines.endpoints import Endpoints
from prfaas.gateway.engines.engine_load import UNKNOWN_LOAD, EngineLoad, load_in
from prfaas.gateway.http.answer_limits import read_answer
from prfaas.gateway.http.json_codec import JsonObject, as_count, as_object, from_json, to_json
from prfaas.gateway.http.rejections import UnavailableError
from prfaas.gateway.openai.adapters import adapters_in
from prfaas.gateway.routing.circuit_breakers import Guards
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.logs import log_event
from prfaas.units import NS_PER_S

KEEPALIVE_S = 3.0
"""Below the 5 s after which uvicorn closes an idle connection under our hands."""

READ_OUT_S = 1.0
"""Time limit of data after the end mark of an answer before the connection is closed."""

MISSED_LOOKS_MAX = 3
"""A busy engine may be slow to say that it is well; a dead one refuses the connection at once."""

FORGET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""vLLM's endpoint, which `engines/vllm_forget.py` opens outside its development mode."""
FORGET_S = 30.0
INTERNAL_ERROR = 500
"""Status of an engine that failed at this request; other 5xx are failures of the engine."""

_log = logging.getLogger(__name__)


class SuspectError(EngineError):
    """The engine failed at a request, by its fault or the request's: counts against nobody yet."""


class EngineUnreachableError(EngineError):
    """The engine took no connection, or dropped it before it answered.

    Attributes:
        had_request: True if it dropped the connection after the request was sent.
    """

    def __init__(self, message: str, *, had_request: bool = False) -> None:
        super().__init__(message)
        self.had_request = had_request


@dataclass(slots=True)
class Engine:
    """One engine, as the gateway sees it.

    Attributes:
        name: Name in the deployment file.
        url: Base URL.
        role: Role of its cluster.
        pool: Name of the pool node on its host.
        adapters: Names of the adapters that it last listed.
        max_model_len: Longest sequence, tokens, as the engine last reported it; outlives its
            readiness, 0 before it was ever ready.
        is_ready: True while the last health check succeeded.
        num_lost: Times that it was ready and then was not.
        num_in_flight: Legs that this gateway has running on it.
        num_broken: Legs that it failed at since it last completed one, or became ready.
        num_missed: Looks in a row that it did not answer in time.
        load: What it said of its load when it was last looked at.
        legs: One for each of the legs, to end it by.
    """

    name: str
    url: str
    role: ClusterRole
    pool: str
    adapters: frozenset[str] = frozenset()
    max_model_len: int = 0
    is_ready: bool = False
    num_lost: int = 0
    num_in_flight: int = 0
    num_broken: int = 0
    num_missed: int = 0
    load: EngineLoad = UNKNOWN_LOAD
    legs: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def num_lost_legs(self) -> int:
        """Legs that it had when it died, once it is known to be gone; at least 1."""
        return max(1, self.num_broken + self.num_in_flight)


class Engines:
    """All engines of a deployment.

    Args:
        deployment: Who there is.
        endpoints: Where they are.
        tls: For engines behind https.
        driver: Hears how they are.
        guards: Hear how their requests end.
        poll_s: Time between two looks at an engine.
    """

    def __init__(
        self,
        deployment: Deployment,
        endpoints: Endpoints,
        tls: ssl.SSLContext,
        driver: Driver,
        guards: Guards,
        poll_s: float = 1.0,
    ) -> None:
        self._driver, self.guards = driver, guards
        self._model = deployment.model.name
        self._tls = tls
        self._poll_s = poll_s
        self._connect_s = deployment.gateway.connect_timeout / NS_PER_S
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: set[asyncio.Task[None]] = set()
        self.by_name = {
            name: Engine(name, endpoints.engines[name].rstrip("/"), cluster.role, table.pool)
            for cluster in deployment.clusters.values()
            for name, table in cluster.engines.items()
        }
        self._looked_at = {name: asyncio.Event() for name in self.by_name}

    def start(self) -> None:
        """Begin to look after the engines."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._tasks = [asyncio.create_task(self._watch(e)) for e in self.by_name.values()]

    async def all_looked_at(self) -> None:
        """Wait until it is known of every engine whether it is well; a look has a limit."""
        for looked_at in self._looked_at.values():
            await looked_at.wait()

    async def close(self) -> None:
        """Stop, and close all connections."""
        tasks = [*self._tasks, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def choose(self, role: ClusterRole) -> Engine | None:
        """The ready engine of a role that takes the longest prompts; the first among equals."""
        ready = (e for e in self.by_name.values() if e.role is role and self.takes(e))
        return max(ready, key=lambda engine: engine.max_model_len, default=None)

    async def is_gone(self, engine: Engine) -> bool:
        """Ask an engine now; True if it is not ready any more."""
        await self._look(engine)
        return not engine.is_ready

    def names(self, role: ClusterRole) -> list[str]:
        """Names of the engines of a role."""
        return [engine.name for engine in self.by_name.values() if engine.role is role]

    def adapters(self) -> frozenset[str]:
        """Names of the adapters that every PD engine has which is ready.

        While none is ready, those that all were last known to have.
        """
        decoders = [e for e in self.by_name.values() if e.role is ClusterRole.PD]
        listed = [e.adapters for e in decoders if e.is_ready] or [e.adapters for e in decoders]
        return frozenset.intersection(*listed) if listed else frozenset()

    def takes(self, engine: Engine) -> bool:
        """Return True if it gets new legs: it is ready, and neither a breaker nor the operator bars
        it."""
        return engine.is_ready and self._driver.takes(engine.name)

    def nobody(self) -> UnavailableError:
        """Return the reason why no PD engine takes requests, and the next step."""
        ready = [e.name for e in self.by_name.values() if e.role is ClusterRole.PD and e.is_ready]
        if any(map(self._driver.is_barred, ready)):
            return UnavailableError(
                "no engine of a PD cluster takes requests: the operator has drained or turned off "
                "those that are ready; `prfaas ctl resume ENGINE` or `prfaas ctl on CLUSTER` takes "
                "them back"
            )
        return UnavailableError("no engine of a PD cluster is ready; try again")

    @asynccontextmanager
    async def post(
        self, engine: Engine, path: str, body: JsonObject, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Run one leg. Leaving with an error, or once the caller has closed the answer, closes the
        connection, which makes the engine abort.

        Raises:
            EngineUnreachableError: There was no connection or no answer; the engine is marked down.

        What the caller raises tells how the leg went: an `EngineError` or a broken connection
        counts against the engine, anything else does not. Neither does a 500, or a `SuspectError`,
        until somebody says so (`Exchange.suspects`).
        """
        told = Told.NOTHING
        engine.num_in_flight += 1
        self.guards.began(engine.name)
        try:
            async with _ended_by(engine):
                response = await self._open(engine, path, body, headers)
                try:
                    yield response
                except BaseException:
                    response.close()
                    raise
                self._keep(response)
            told = _told_by(response.status)
            engine.num_broken = 0 if told is Told.GOOD else engine.num_broken + 1
        except SuspectError:
            engine.num_broken += 1
            raise
        except EngineUnreachableError as error:
            engine.num_broken += error.had_request
            told = Told.FAILED
            raise
        except (EngineError, aiohttp.ClientError):
            engine.num_broken += 1
            told = Told.FAILED
            raise
        finally:
            engine.num_in_flight -= 1
            self.guards.ended(engine.name, told)

    async def forget(self, engine: Engine) -> bool:
        """Have an engine drop all blocks that it holds; it begins what is under way anew.

        Returns:
            False if it cannot just now, as while blocks are loaded into it.

        Raises:
            EngineError: It does not answer, or has no such endpoint.
        """
        try:
            async with (
                asyncio.timeout(FORGET_S),
                self._http.post(engine.url + FORGET, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise EngineError(
                        f"{FORGET.partition('?')[0]} answers {response.status}: start it with "
                        "--middleware prfaas.engines.vllm_forget.ForgetRoute, or restart it"
                    )
                answer = as_object(from_json(await read_answer(response)))
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"no answer ({type(error).__name__}); restart it") from None
        except TimeoutError:
            raise EngineError(f"no answer within {FORGET_S:g} s; restart it") from None
        return answer.get("success") is True

    def _keep(self, response: aiohttp.ClientResponse) -> None:
        """Use a connection again: read what there is of its answer behind the end mark."""
        if not response.closed:
            task = asyncio.create_task(_read_out(response))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _open(
        self, engine: Engine, path: str, body: JsonObject, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        try:
            return await self._http.post(
                engine.url + path,
                data=to_json(body),
                headers={"Content-Type": "application/json", **headers},
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            reason = f"{type(error).__name__}: {error}"
            self._mark_down(engine, reason)
            took_it = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineUnreachableError(
                f"engine {engine.name}: {reason}", had_request=took_it
            ) from None

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the engines were not started")
        return self._session

    async def _watch(self, engine: Engine) -> None:
        while True:
            await self._look(engine)
            self._looked_at[engine.name].set()
            # One that has not answered in time is asked again at once, while others wait for it.
            if not engine.is_ready or not engine.num_missed:
                await asyncio.sleep(self._poll_s)

    async def _look(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                await self._get(engine, "/health")
                await self._look_at_models(engine)
                await self._look_at_queue(engine)
            engine.num_missed = 0
        except (aiohttp.ClientError, ValueError, EngineError) as error:
            self._mark_down(engine, f"{type(error).__name__}: {error}")
        except TimeoutError:
            engine.num_missed += 1
            if engine.num_missed >= MISSED_LOOKS_MAX:
                self._mark_down(engine, f"no answer to {engine.num_missed} looks")
                self._end_legs(engine)

    def _end_legs(self, engine: Engine) -> None:
        """End the legs of an engine that does not answer, where somebody else can go on.

        A host that is gone, or a process that hangs, closes no connection. What a PrfaaS engine was
        to prefill can always be prefilled in the PD cluster. One that answers that it is not well
        may be draining, and ends its legs by itself.
        """
        others = (e for e in self.by_name.values() if e.role is engine.role and self.takes(e))
        if engine.role is ClusterRole.PRFAAS or any(others):
            for leg in engine.legs:
                leg.reschedule(asyncio.get_running_loop().time())

    async def _look_at_models(self, engine: Engine) -> None:
        """Ask what it serves: adapters come and go while an engine runs, its model does not."""
        try:
            models = from_json(await self._get(engine, "/v1/models"))
        except (EngineError, ValueError):
            if engine.is_ready:
                return
            raise
        if not engine.is_ready:
            self._mark_ready(engine, models)
        engine.adapters = adapters_in(models, self._model)

    async def _look_at_queue(self, engine: Engine) -> None:
        """Ask how many requests wait; an engine that does not say so has an unknown queue."""
        asked_at_ns = time.monotonic_ns()
        try:
            metrics = await self._get(engine, "/metrics")
        except EngineError:
            engine.load = UNKNOWN_LOAD
            return
        engine.load = load = load_in(metrics)
        if load.num_waiting is not None:
            self._driver.engine_seen(engine.name, load.num_waiting, asked_at_ns, load.num_running)

    async def _get(self, engine: Engine, path: str) -> bytes:
        async with self._http.get(engine.url + path, allow_redirects=False) as response:
            if response.status != 200:
                raise EngineError(f"{path} answers {response.status}")
            return await read_answer(response)

    def _mark_ready(self, engine: Engine, models: object) -> None:
        found = as_object(models).get("data")
        for model in found if isinstance(found, list) else []:
            length = as_count(as_object(model).get("max_model_len"))
            if as_object(model).get("id") == self._model and length:
                engine.max_model_len, engine.is_ready, engine.num_broken = length, True, 0
                self._driver.engine_ready(engine.name, length, time.monotonic_ns())
                fields = {"engine": engine.name, "max_model_len": length}
                log_event(_log, logging.INFO, "engine_ready", **fields)
                return
        raise EngineError(f"it does not serve {self._model!r}")

    def _mark_down(self, engine: Engine, reason: str) -> None:
        if engine.is_ready:
            engine.is_ready = False
            engine.num_lost += 1
            log_event(_log, logging.WARNING, "engine_down", engine=engine.name, why=reason)
            self._driver.engine_gone(engine.name, time.monotonic_ns())
            self.guards.refresh()


def _told_by(status: int) -> Told:
    if status == INTERNAL_ERROR:
        return Told.NOTHING
    return Told.FAILED if status >= 500 else Told.GOOD


async def _read_out(response: aiohttp.ClientResponse) -> None:
    try:
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(READ_OUT_S):
                while await response.content.readany():
                    pass
    finally:
        response.release()


@asynccontextmanager
async def _ended_by(engine: Engine) -> AsyncIterator[None]:
    """A leg that is over when its engine is given up.

    Raises:
        EngineUnreachableError: It was.
    """
    leg = asyncio.timeout(None)
    try:
        async with leg:
            engine.legs.add(leg)
            yield
    except TimeoutError:
        if not leg.expired():
            raise
        raise EngineUnreachableError(f"engine {engine.name} does not answer any more") from None
    finally:
        engine.legs.discard(leg)
