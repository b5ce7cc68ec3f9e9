"""Probes of engines: whether they are ready, what they serve, and how many requests wait.

Adapters (LoRA) are models of an engine beside the one that is served. Requests for them are
prefilled and decoded by one PD engine. vLLM names the blocks of an adapter by its name and path,
which says nothing of its bytes at another site.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping

import aiohttp

from prfaas.config.clusters import ClusterRole
from prfaas.core.resilience.quarantine import Guards
from prfaas.errors import EngineError
from prfaas.gateway.engines.engine import UNKNOWN_LOAD, Engine, OtherModelError, load_in
from prfaas.gateway.http.json_codec import as_count, as_object, from_json
from prfaas.gateway.http.responses import read_answer
from prfaas.gateway.routing.dispatch_driver import Driver
from prfaas.logs import log_event
from prfaas.tasks import cancel_all, slot_of

_log = logging.getLogger(__name__)


ADAPTERS_MAX = 1000
"""Adapters of an engine that can be asked for; vLLM holds far fewer at a time."""
NAME_CHARS_MAX = 256


def adapters_in(models: object, model: str) -> frozenset[str]:
    """Names of the adapters in an engine's list of models: those with a parent."""
    found = as_object(models).get("data")
    cards = [as_object(card) for card in found] if isinstance(found, list) else []
    names = [
        name
        for card in cards
        if isinstance(name := card.get("id"), str)
        and isinstance(card.get("parent"), str)
        and 0 < len(name) <= NAME_CHARS_MAX
        and name != model
    ]
    return frozenset(names[:ADAPTERS_MAX])


MISSED_LOOKS_MAX = 3
"""A busy engine may be slow to answer a health check; a dead one refuses the connection
immediately."""

LOOKS_PER_S = 1000
"""At all engines together: with more of them each is asked less often."""
POLL_MAX_S = 2.0
"""Longest pause from that: reports count as unknown after 3 s."""
JITTER = 0.1
"""Largest change of a pause, as a share of it: probes that began together spread out."""
AT_ONCE_MAX = 64
"""Probes in flight; one without an answer after `PROMPT_S` leaves its slot to another engine."""
PROMPT_S = 0.25
HUNG_AT_ONCE_MAX = 256
"""Probes in flight of engines that are known to hang: they take no slot of the others."""
LOOKS_A_LIST = 4
"""Looks for each time that an engine lists its adapters."""

_NO_ENGINE = "its url has to be that of an engine itself"
_HINTS = dict.fromkeys(
    (401, 403),
    "gateways send engines no key: start it without --api-key, and let only gateways reach it",
)


class EngineProbes:
    """Probes every engine as long as the gateway runs.

    Args:
        model: Name of the served model.
        guards: Called when an engine is lost.
        limit_s: Time for one probe, seconds.
        poll_s: Pause between two probes of an engine, seconds.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        model: str,
        driver: Driver,
        guards: Guards,
        limit_s: float,
        poll_s: float,
    ) -> None:
        self._engines, self._model = engines, model
        self._driver, self._guards = driver, guards
        self._limit_s, self._poll_s = limit_s, poll_s
        self.on_change: Callable[[Engine, Exception | None], None] = lambda *_: None
        """Called with an engine that has become ready, or with the reason why it is not."""
        self.on_made: Callable[[int, int, int], None] = lambda *_: None
        """Called with tokens that an engine has made, its sequences meanwhile, and the time, ns."""
        self._slots, self._hung = (asyncio.Semaphore(n) for n in (AT_ONCE_MAX, HUNG_AT_ONCE_MAX))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probed = {name: asyncio.Event() for name in engines}

    def start(self, http: aiohttp.ClientSession) -> None:
        """Begin."""
        self._http = http
        for engine in self._engines.values():
            self.follow(engine)

    def follow(self, engine: Engine) -> None:
        """Probe an engine from now on."""
        self._probed.setdefault(engine.name, asyncio.Event())
        self._tasks[engine.name] = asyncio.create_task(self._watch(engine))

    def unfollow(self, name: str) -> None:
        """Probe an engine no more."""
        self._tasks.pop(name).cancel()
        self._probed.pop(name).set()

    async def all_probed(self) -> None:
        """Wait until every engine was probed once."""
        for probed in [*self._probed.values()]:
            await probed.wait()

    async def close(self) -> None:
        """Stop."""
        await cancel_all(self._tasks.values())

    async def _watch(self, engine: Engine) -> None:
        while True:
            is_hung = engine.num_missed and not engine.is_ready
            slots, longest_s = (
                (self._hung, 2 * self._limit_s) if is_hung else (self._slots, PROMPT_S)
            )
            async with slot_of(slots, longest_s):
                await self.look(engine)
            self._probed[engine.name].set()
            # One that has not answered in time is asked again at once, while others wait for it.
            if not engine.is_ready or not engine.num_missed:
                round_s = min(len(self._engines) / LOOKS_PER_S, POLL_MAX_S)
                jitter = random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311
                await asyncio.sleep(max(self._poll_s, round_s) * jitter)

    async def look(self, engine: Engine) -> None:
        """Probe an engine once, within the connect timeout."""
        try:
            async with asyncio.timeout(self._limit_s):
                await self._get(engine, "/health")
                if not engine.is_ready or not engine.num_looks % LOOKS_A_LIST:
                    await self._look_at_models(engine)
                await self._look_at_queue(engine)
            engine.num_looks += 1
            self._driver.states.changed.add(engine.name)
            engine.num_missed = 0
        except EngineError as error:
            self.mark_down(engine, str(error))
            self.on_change(engine, error)
        except (aiohttp.ClientError, ValueError) as error:
            self.mark_down(engine, f"{type(error).__name__}: {error}")
            self.on_change(engine, error)
        except TimeoutError:
            engine.num_missed += 1
            if engine.num_missed >= MISSED_LOOKS_MAX:
                self.mark_down(engine, f"no answer to {engine.num_missed} looks")
                self._end_legs(engine)

    def _end_legs(self, engine: Engine) -> None:
        """End the legs of an engine that does not answer, where somebody else can go on.

        A host that is gone, or a process that hangs, closes no connection. What a PrfaaS engine was
        to prefill can always be prefilled in the PD cluster. One that answers that it is not well
        may be draining, and ends its legs by itself.
        """
        others = (e for e in self._engines.values() if e.role is engine.role and self._takes(e))
        if engine.role is ClusterRole.PRFAAS or any(others):
            for leg in engine.legs:
                leg.reschedule(asyncio.get_running_loop().time())

    async def _look_at_models(self, engine: Engine) -> None:
        """Ask what it serves: adapters come and go while an engine runs, its model does not."""
        try:
            answer = await self._get(engine, "/v1/models")
            try:
                models = from_json(answer)
            except ValueError:
                raise EngineError(f"/v1/models answers no JSON; {_NO_ENGINE}") from None
        except EngineError:
            if engine.is_ready:
                return
            raise
        if not engine.is_ready:
            self._mark_ready(engine, models)
        if engine.adapters != (found := adapters_in(models, self._model)):
            engine.adapters = found
            self._driver.states.note(engine.name)

    async def _look_at_queue(self, engine: Engine) -> None:
        """Poll the number of waiting requests; without an answer the queue is unknown."""
        asked_at_ns = time.monotonic_ns()
        try:
            metrics = await self._get(engine, "/metrics")
        except EngineError:
            engine.load = UNKNOWN_LOAD
            return
        before, engine.load = engine.load, load_in(metrics, engine.rank)
        load = engine.load
        passed_ns, engine.load_at_ns = asked_at_ns - engine.load_at_ns, asked_at_ns
        if load.num_made is not None and before.num_made is not None and load.num_running:
            most = max(load.num_running, before.num_running or 0)
            self.on_made(load.num_made - before.num_made, most, passed_ns)
        if load.num_waiting is not None:
            self._driver.engine_seen(engine.name, load.num_waiting, asked_at_ns, load.num_running)

    def _takes(self, engine: Engine) -> bool:
        return engine.is_ready and self._driver.takes(engine.name)

    async def _get(self, engine: Engine, path: str) -> bytes:
        async with self._http.get(engine.url + path, allow_redirects=False) as response:
            if response.status != 200:
                hint = _HINTS.get(response.status, _NO_ENGINE if response.status < 500 else "")
                raise EngineError(f"{path} answers {response.status}{hint and '; '}{hint}")
            return await read_answer(response)

    def _mark_ready(self, engine: Engine, models: object) -> None:
        found = as_object(models).get("data")
        for model in found if isinstance(found, list) else []:
            length = as_count(as_object(model).get("max_model_len"))
            if as_object(model).get("id") == self._model and length:
                engine.max_model_len, engine.is_ready, engine.num_broken = length, True, 0
                engine.why_down = ""
                self._driver.engine_ready(engine.name, length, time.monotonic_ns())
                fields = {"engine": engine.name, "max_model_len": length}
                log_event(_log, logging.INFO, "engine_ready", **fields)
                self.on_change(engine, None)
                return
        raise OtherModelError(f"it does not serve {self._model!r}")

    def mark_down(self, engine: Engine, reason: str) -> None:
        """An engine does not answer as it should; the log has each new reason once."""
        is_new, engine.why_down = engine.why_down != reason, reason
        if not engine.is_ready and is_new:
            log_event(_log, logging.WARNING, "engine_not_ready", engine=engine.name, why=reason)
        if engine.is_ready:
            engine.is_ready = False
            engine.num_lost += 1
            log_event(_log, logging.WARNING, "engine_down", engine=engine.name, why=reason)
            self._driver.engine_gone(engine.name, time.monotonic_ns())
            self._guards.refresh(time.monotonic_ns())
            self.on_change(engine, EngineError(reason))
