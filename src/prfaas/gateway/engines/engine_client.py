"""The engines: which of them takes a request, and how it is posted."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeVar

import aiohttp

from prfaas.config.addresses import Endpoints
from prfaas.config.clusters import ClusterRole
from prfaas.config.deployment import Deployment
from prfaas.core.invariants import check_invariants
from prfaas.core.resilience.circuit_breaker import BreakerOutcome
from prfaas.core.resilience.quarantine import Guards
from prfaas.errors import EngineError
from prfaas.gateway.engines.engine import (
    INTERNAL_ERROR,
    Engine,
    EngineUnreachableError,
    NoResetError,
    SuspectError,
)
from prfaas.gateway.engines.engine_connections import EngineConnections
from prfaas.gateway.engines.engine_probes import EngineProbes
from prfaas.gateway.http.errors import UnavailableError
from prfaas.gateway.http.json_codec import JsonObject, as_object, from_json, to_json
from prfaas.gateway.http.responses import read_answer
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.units import NS_PER_S

FORGET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""vLLM's endpoint, which `engines/vllm_forget.py` opens outside its development mode."""
FORGET_S = 30.0
TOKENIZE_S = 30.0
"""Time limit of an engine that renders and tokenises a chat."""


class Opened(Protocol):
    """An answer that has begun, or has come whole."""

    @property
    def status(self) -> int:
        """HTTP status."""

    def close(self) -> None:
        """End it."""


AnOpened = TypeVar("AnOpened", bound=Opened)


class Engines(EngineConnections):
    """All engines of a deployment.

    Args:
        tls: For engines behind https.
        guards: Receive the ends of their requests.
        poll_s: Time between two polls of an engine.
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
        super().__init__(tls, deployment.gateway.connect_timeout / NS_PER_S)
        self._driver, self.guards = driver, guards
        self.by_name = {
            name: Engine.of(name, endpoints.engines[name], cluster.role, table)
            for cluster in deployment.clusters.values()
            for name, table in cluster.engines.items()
        }
        self._num_changes = -1
        """Changes of engines when what follows was found."""
        self._chosen: dict[ClusterRole, Engine | None] = {}
        self._adapters: frozenset[str] | None = None
        self._count_decoding()
        self.probes = EngineProbes(
            self.by_name, deployment.model.name, driver, guards, self._connect_s, poll_s
        )

    def add(self, engine: Engine) -> None:
        """An engine joins: it is probed from now on."""
        self.by_name[engine.name] = engine
        self._driver.states.note(engine.name)
        self._count_decoding()
        self.probes.follow(engine)

    def remove(self, name: str) -> None:
        """An engine without legs has left."""
        del self.by_name[name]
        self._driver.states.note(name)
        self._count_decoding()
        self.probes.unfollow(name)

    def _count_decoding(self) -> None:
        self.num_decoding = len(self.names(ClusterRole.PD))

    def _forget_old(self) -> None:
        """Forget facts of all engines if one has changed; else no request looks at each of them."""
        if self._num_changes != self._driver.states.num_changes:
            self._num_changes, self._adapters = self._driver.states.num_changes, None
            self._chosen.clear()

    def start(self) -> None:
        """Begin to probe the engines."""
        self.probes.start(self.start_session())

    async def close(self) -> None:
        """Stop, and close all connections."""
        await self.probes.close()
        await super().close()

    def validate(self) -> None:
        """Check what has to hold whenever nothing is being done; AssertionError if it does not."""
        for name, engine in self.by_name.items():
            legs, num = len(engine.legs), engine.num_in_flight
            is_one = engine.is_ready != bool(engine.why_down)
            is_up = f"{name} is up and down at once", is_one
            check_invariants([is_up, (f"{name} has {legs} legs, {num} in flight", legs <= num)])

    def choose(self, role: ClusterRole) -> Engine | None:
        """The ready engine of a role that takes the longest prompts; the first among equals."""
        self._forget_old()
        if role not in self._chosen:
            ready = (e for e in self.by_name.values() if e.role is role and self.takes(e))
            longest = max(ready, key=lambda engine: engine.max_model_len, default=None)
            self._chosen[role] = longest
        return self._chosen[role]

    async def is_gone(self, engine: Engine) -> bool:
        """Ask an engine now; True if it is not ready any more."""
        await self.probes.look(engine)
        return not engine.is_ready

    def names(self, role: ClusterRole) -> list[str]:
        """Names of the engines of a role."""
        return [engine.name for engine in self.by_name.values() if engine.role is role]

    def adapters(self) -> frozenset[str]:
        """Names of the adapters that every PD engine has which is ready.

        While none is ready, those that all were last known to have.
        """
        self._forget_old()
        if self._adapters is None:
            decoders = [e for e in self.by_name.values() if e.role is ClusterRole.PD]
            listed = [e.adapters for e in decoders if e.is_ready] or [e.adapters for e in decoders]
            self._adapters = frozenset.intersection(*listed) if listed else frozenset()
        return self._adapters

    def takes(self, engine: Engine) -> bool:
        """Return True if it gets new legs: it is ready, and neither a breaker nor the operator bars
        it."""
        return engine.is_ready and self._driver.takes(engine.name)

    def nobody(self) -> UnavailableError:
        """Return the reason why no PD engine takes requests, and the next step."""
        ready = [e.name for e in self.by_name.values() if e.role is ClusterRole.PD and e.is_ready]
        if any(map(self._driver.states.is_barred, ready)):
            return UnavailableError(
                "no engine of a PD cluster takes requests: the operator has drained or turned off "
                "those that are ready; `prfaas ctl resume ENGINE` or `prfaas ctl on CLUSTER` takes "
                "them back"
            )
        return UnavailableError("no engine of a PD cluster is ready; try again")

    def post(
        self, engine: Engine, path: str, body: JsonObject, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Run one leg, and count it. An engine that cannot be reached is marked down."""
        return self.leg(engine, self._open(engine, path, body, headers))

    @asynccontextmanager
    async def leg(self, engine: Engine, opening: Awaitable[AnOpened]) -> AsyncIterator[AnOpened]:
        """Count a leg on an engine from its opening on.

        The exception of the caller is the outcome of the leg: an `EngineError` or a broken
        connection counts against the engine, others do not. A 500 or a `SuspectError` counts only
        once it is confirmed (`Exchange.suspects`).
        """
        told, leg = BreakerOutcome.NOTHING, asyncio.timeout(None)
        engine.num_in_flight += 1
        self.guards.began(engine.name, time.monotonic_ns())
        try:
            async with leg:
                engine.legs.add(leg)
                response = await opening
                del opening  # It has the request.
                try:
                    yield response
                except BaseException:
                    response.close()
                    raise
                if isinstance(response, aiohttp.ClientResponse):
                    self.keep(response)
            told = _told_by(response.status)
            engine.num_broken = 0 if told is BreakerOutcome.GOOD else engine.num_broken + 1
        except SuspectError:
            engine.num_broken += 1
            raise
        except EngineUnreachableError as error:
            engine.num_broken += error.had_request
            told = BreakerOutcome.FAILED
            raise
        except (EngineError, aiohttp.ClientError):
            engine.num_broken += 1
            told = BreakerOutcome.FAILED
            raise
        except TimeoutError:
            if not leg.expired():
                raise
            told = BreakerOutcome.FAILED
            raise EngineUnreachableError(f"engine {engine.name} does not answer any more") from None
        finally:
            engine.legs.discard(leg)
            engine.num_in_flight -= 1
            self.guards.ended(engine.name, told, time.monotonic_ns())

    async def forget(self, engine: Engine) -> bool:
        """Have an engine drop all blocks that it holds; it begins what is under way anew;
        EngineError if it does not answer, or has no such endpoint.

        Returns:
            False if it cannot just now, as while blocks are loaded into it.
        """
        try:
            async with (
                asyncio.timeout(FORGET_S),
                self._http.post(engine.url + FORGET, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    kind = NoResetError if response.status in (404, 405) else EngineError
                    raise kind(
                        f"{FORGET.partition('?')[0]} answers {response.status}: start it with "
                        "--middleware prfaas.engines.vllm_forget.ForgetRoute, or restart it"
                    )
                answer = as_object(from_json(await read_answer(response)))
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineError(f"no answer ({type(error).__name__}); restart it") from None
        except TimeoutError:
            raise EngineError(f"no answer within {FORGET_S:g} s; restart it") from None
        return answer.get("success") is True

    async def tokenize(self, engine: Engine, body: JsonObject) -> tuple[int, bytes]:
        """Have an engine render and tokenise a chat; return its status and answer.

        Raises:
            aiohttp.ClientError, TimeoutError: It does not answer.
            EngineError: Its answer is too long.
        """
        async with (
            asyncio.timeout(TOKENIZE_S),
            self._http.post(
                f"{engine.url}/tokenize",
                data=to_json(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response,
        ):
            return response.status, await read_answer(response)

    async def _open(
        self, engine: Engine, path: str, body: JsonObject, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        try:
            return await self.open(engine, path, body, headers)
        except EngineUnreachableError as error:
            self.probes.mark_down(engine, error.reason)
            raise


def _told_by(status: int) -> BreakerOutcome:
    if status == INTERNAL_ERROR:
        return BreakerOutcome.NOTHING
    return BreakerOutcome.FAILED if status >= 500 else BreakerOutcome.GOOD
