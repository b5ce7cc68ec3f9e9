"""Purges: all blocks of a tenant, or that came from a pool, leave the deployment.

Pool nodes drop them and take no more of the source (`pool/node/keeping.py`), engines forget what
they hold, and only then do pool nodes take blocks of the source again: an engine that has not
forgotten yet can bring nothing back. Each step may be done twice: what broke off is asked for
again. A bar of a purge that broke off ends by itself. What was begun is in a file until all parts
are done (`purge/intents.py`): a purge that a crash or a part that is gone interrupted is repeated,
at the parts that failed (`Unfinished`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web
from msgspec.structs import replace

from prfaas.core.cache.keep_rules import BAR_NS, Effect
from prfaas.core.control.changes import ChangeEntry, Loop
from prfaas.errors import EngineError, PeerError, RequestError
from prfaas.gateway.api.operator_api import Name, json_body
from prfaas.gateway.engines.engine import Engine, NoResetError
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.http.responses import json_response
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.gateway.tenancy.tenants import Tenants
from prfaas.logs import log_event
from prfaas.purge.intents import Intents, Unfinished
from prfaas.purge.targets import Target
from prfaas.tasks import cancel_all
from prfaas.wire.messages.gateway import OrderDone

_log = logging.getLogger(__name__)

TRIES_MAX, TRIES_FREE = 40, 4
"""Attempts to reset an engine, and attempts before it gets no new requests: an engine cannot be
reset while it loads blocks."""
REPEAT_MAX_S = 600.0
LEFT = "it has left the deployment"
TAKEN_AGAIN = (
    "it accepted blocks of the source again before all engines were reset: it was restarted, or "
    "the reset took more than two minutes; run the purge again"
)
_WHY = {Loop.OPERATOR: "as the operator asked", Loop.INTEGRITY: "its blocks were altered"}


class PurgeBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /control/purge`."""

    source: Name = ""
    tenant: Name = ""
    prefix_of: Name = ""
    dry_run: bool = False


class PurgeLoop:
    """Runs purges, one at a time.

    Args:
        live: Pools drop blocks, and engines forget; one gets no requests while it has to forget.
        on_forgotten: Called with the name of each engine that has forgotten.
        tenants: Known tenants, and their tags.
        retry_s: Wait before an engine is asked again, seconds.
        repeat_s: Wait before a purge that is not done is repeated, seconds; doubles with each try.
    """

    def __init__(
        self,
        live: LiveParts,
        on_forgotten: Callable[[str], None],
        tenants: Tenants,
        retry_s: float,
        repeat_s: float,
    ) -> None:
        self._live, self._on_forgotten = live, on_forgotten
        self._retry_s, self._repeat_s = retry_s, repeat_s
        self._tenants = tenants
        self._intents = Intents(live.deployment.state, live.deployment.gateway.name)
        self._unfinished = Unfinished()
        self._no_reset: set[str] = set()
        """Engines without a route to reset them: asking again changes nothing."""
        self._tasks: set[asyncio.Task[JsonObject]] = set()

    async def purge(
        self,
        source: str,
        tenant: str = "",
        prefix_of: str = "",
        *,
        is_dry: bool,
        loop: Loop = Loop.OPERATOR,
    ) -> JsonObject:
        """Drop blocks. Goes on also when no request waits for it any more.

        Args:
            source: Name of a pool; one that the deployment has no longer will do.
            tenant: Name of a tenant; one that the deployment has no longer will do.
            prefix_of: Id of a recent request, for the blocks of its prompt.
            loop: Author of the purge.

        Raises:
            RequestError: Nobody knows of such a pool or tenant, or a purge is under way.
        """
        if [bool(source), bool(tenant), bool(prefix_of)].count(True) != 1:
            raise RequestError("give the source, the tenant or the request whose blocks are purged")
        if self._tasks:
            raise RequestError(
                "a purge is running at this gateway; try again after its end", status=409
            )
        if prefix_of:
            recent = self._live.records.names.find(prefix_of)
            target = Target.of(recent, self._tenants.tag_of(recent.tenant))
        else:
            target = Target(source, tenant, self._tenants.tag_of(tenant) if tenant else None)
        return await self._start(target, loop, is_dry=is_dry)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_post("/control/purge", self._ask)

    async def _ask(self, request: web.Request) -> web.Response:
        body = await json_body(request, PurgeBody)
        return json_response(
            await self.purge(body.source, body.tenant, body.prefix_of, is_dry=body.dry_run)
        )

    async def repeat(self) -> None:
        """Repeat what is not done of purges, at growing intervals while that has no success."""
        pause_s = self._repeat_s
        while True:
            has_tried = False
            for target in self._intents.pending():
                parts = self._due(target)
                if parts and not self._tasks:
                    has_tried = True
                    await self._again(target, parts)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REPEAT_MAX_S) if has_tried else self._repeat_s

    def _due(self, target: Target) -> frozenset[str]:
        pools, engines = self._live.pools, self._live.engines.by_name.values()
        reachable = {pool for pool in pools.names() if pools.is_live(pool)}
        reachable |= {engine.name for engine in engines if engine.is_ready}
        tables = self._live.deployment.clusters.values()
        clusters = [(table.pools, table.engines) for table in tables]
        return self._unfinished.due(target, reachable, pools.names(), clusters)

    async def _again(self, target: Target, parts: frozenset[str]) -> None:
        try:
            await self._start(target, Loop.OPERATOR, is_dry=False, parts=parts)
        except Exception as error:  # It stays, and is repeated; so are the others.
            log_event(_log, logging.ERROR, "purge_repeat_failed", of=str(target), why=repr(error))

    async def _start(
        self, target: Target, loop: Loop, *, is_dry: bool, parts: frozenset[str] | None = None
    ) -> JsonObject:
        task = asyncio.create_task(self._run(target, loop, is_dry=is_dry, parts=parts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Break off; what is left of a purge is done when it is asked for again."""
        await cancel_all(self._tasks)

    async def _run(
        self, target: Target, loop: Loop, *, is_dry: bool, parts: frozenset[str] | None = None
    ) -> JsonObject:
        pools, tenants = self._live.pools.names(), self._tenants.by_name
        is_known = bool(target.hashes) or target.source in pools or target.tenant in tenants
        if is_dry or (not is_known and target not in self._intents.pending()):
            found = await self._at_pools(target, is_dry=True)
            if not is_known and not any(pool.num_blocks or pool.problem for pool in found.values()):
                raise _unknown(target, pools if target.tag is None else list(tenants))
            if is_dry:
                return _report(target, found, {}, None)
        try:
            await asyncio.to_thread(self._intents.begin, target)
        except OSError as error:
            raise RequestError(
                f"the purge cannot be recorded in `state`: {error.strerror}; nothing was dropped",
                status=503,
            ) from None
        found = await self._at_pools(target, is_dry=False, parts=parts)
        engines = [
            e for e in self._live.engines.by_name.values() if parts is None or e.name in parts
        ]
        problems = await asyncio.gather(*(self._forget(engine) for engine in engines))
        ends = (self._end_at(pool, target, told) for pool, told in found.items())
        found = dict(zip(found, await asyncio.gather(*ends), strict=True))
        forgot = dict(zip((engine.name for engine in engines), problems, strict=True))
        entry = self._note(target, loop, found, forgot)
        report = _report(target, found, forgot, entry.as_json())
        failed = {name for name, told in found.items() if told.problem}
        failed |= {name for name, problem in forgot.items() if problem} - self._no_reset
        if self._unfinished.note(target, parts, failed):
            with contextlib.suppress(OSError):  # Then it is repeated.
                await asyncio.to_thread(self._intents.end, target)
        return report

    async def _at_pools(
        self, target: Target, *, is_dry: bool, parts: frozenset[str] | None = None
    ) -> dict[str, OrderDone]:
        """Result of a purge at each pool node, or at those of `parts`."""
        names = [name for name in self._live.pools.names() if parts is None or name in parts]
        found = await asyncio.gather(*(self._at(pool, target, is_dry) for pool in names))
        return dict(zip(names, found, strict=True))

    async def _at(self, pool: str, target: Target, is_dry: bool) -> OrderDone:
        try:
            order = target.order(Effect.PURGE, BAR_NS, is_dry=is_dry)
            return await self._live.pools.order(pool, order)
        except PeerError as error:
            return OrderDone(job=0, problem=str(error))

    async def _end_at(self, pool: str, target: Target, told: OrderDone) -> OrderDone:
        """End a purge at a pool node; it is not done if blocks were taken again before."""
        try:
            end = await self._live.pools.order(pool, target.order(Effect.PURGE))
        except PeerError as error:
            return replace(told, problem=told.problem or f"at its end: {error}")
        # A pool node that refuses the end, or has taken blocks since.
        problem = told.problem or end.problem or ("" if end.was_in_force else TAKEN_AGAIN)
        return replace(told, problem=problem)

    async def _forget(self, engine: Engine) -> str:
        """Have an engine forget; why it did not, or nothing."""
        is_held = False
        self._no_reset.discard(engine.name)
        try:
            for number in range(TRIES_MAX):
                if await self._live.engines.forget(engine):
                    self._on_forgotten(engine.name)
                    return ""
                if number == TRIES_FREE:
                    is_held = True
                    self._live.driver.set_paused(engine.name, time.monotonic_ns(), paused=True)
                await asyncio.sleep(self._retry_s)
        except EngineError as error:
            if isinstance(error, NoResetError):
                self._no_reset.add(engine.name)
            return str(error)
        except KeyError:
            return LEFT
        finally:
            if is_held and engine.name in self._live.engines.by_name:
                self._live.driver.set_paused(engine.name, time.monotonic_ns(), paused=False)
        return f"it would not in {TRIES_MAX} attempts: blocks are being loaded; ask again"

    def _note(
        self, target: Target, loop: Loop, found: dict[str, OrderDone], forgot: dict[str, str]
    ) -> ChangeEntry:
        failed = [name for name, told in found.items() if told.problem]
        failed += [name for name, problem in forgot.items() if problem]
        left = f"; NOT DONE at {', '.join(failed)}: ask again" if failed else ""
        return self._live.journal.note(
            loop,
            "purge",
            str(target),
            why=f"{_WHY.get(loop, '')}{left}",
            numbers={
                "blocks": sum(told.num_blocks for told in found.values()),
                "bytes": sum(told.num_bytes for told in found.values()),
                "transfers": sum(told.num_transfers for told in found.values()),
                "engines": sum(not problem for problem in forgot.values()),
                "not_done": len(failed),
            },
        )


def _report(
    target: Target,
    found: dict[str, OrderDone],
    forgot: dict[str, str],
    decision: dict[str, object] | None,
) -> JsonObject:
    """Return the report of a purge, as the API shows it.

    Args:
        found: Result at each pool node.
        forgot: Why each engine did not forget; empty if it did.
        decision: The entry of the purge; None for a dry run.
    """
    problems = [told.problem for told in found.values()] + list(forgot.values())
    return {
        "source": target.source,
        "tenant": target.tenant,
        "request": target.request,
        "dry_run": decision is None,
        "is_complete": not any(problems),
        "pools": [_at_pool(name, told) for name, told in found.items()],
        "engines": [{"name": name, "problem": problem} for name, problem in forgot.items()],
        "decision": decision,
    }


def _at_pool(name: str, told: OrderDone) -> JsonObject:
    fields = (
        "num_blocks",
        "host_bytes",
        "disk_bytes",
        "num_transfers",
        "problem",
        "shared_bytes",
    )
    return {"name": name} | {field: getattr(told, field) for field in fields}


def _unknown(target: Target, known: list[str]) -> RequestError:
    """Return the refusal of a purge of a pool or tenant that nobody knows."""
    kind, name = ("pool", target.source) if target.tag is None else ("tenant", target.tenant)
    return RequestError(
        f"there is no {kind} {name[:80]!r}, and no block came from such a {kind}; known {kind}s: "
        f"{', '.join(known) or 'none'}",
        status=404,
    )
