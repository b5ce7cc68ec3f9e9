"""Purges: all blocks that came from a pool, or were computed from such, leave the deployment.

Pool nodes drop them and take no more of the source (`pool/node/purging.py`), engines forget what
they hold, and only then do pool nodes take blocks of the source again: an engine that has not
forgotten yet can bring nothing back. Each step may be done twice: what broke off is asked for
again. A bar of a purge that broke off ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import asdict, replace

from prfaas.audit.changes import Entry, Loop
from prfaas.errors import EngineError, PeerError, RequestError
from prfaas.gateway.engines.engine import Engine
from prfaas.gateway.http.json_codec import JsonObject
from prfaas.gateway.telemetry.live_parts import LiveParts
from prfaas.tasks import cancel_all
from prfaas.wire.messages.gateway import Purged

TRIES_MAX, TRIES_FREE = 40, 4
"""Attempts to reset an engine, and attempts before it gets no new requests: an engine cannot be
reset while it loads blocks."""
TAKEN_AGAIN = (
    "it accepted blocks of the source again before all engines were reset: it was restarted, or "
    "the reset took more than two minutes; run the purge again"
)


_WHY = {Loop.OPERATOR: "as the operator asked", Loop.INTEGRITY: "its blocks were altered"}


class Purging:
    """Runs purges, one at a time.

    Args:
        live: Pools drop blocks, and engines forget; one gets no requests while it has to forget.
        on_forgotten: Called with the name of each engine that has forgotten.
        retry_s: Wait before an engine is asked again, seconds.
    """

    def __init__(
        self, live: LiveParts, on_forgotten: Callable[[str], None], retry_s: float
    ) -> None:
        self._live, self._on_forgotten, self._retry_s = live, on_forgotten, retry_s
        self._tasks: set[asyncio.Task[JsonObject]] = set()

    async def purge(self, source: str, *, is_dry: bool, loop: Loop = Loop.OPERATOR) -> JsonObject:
        """Drop what came from a pool. Goes on also when no request waits for it any more.

        Args:
            source: Name of the pool; one that the deployment has no longer will do.
            loop: Author of the purge.

        Raises:
            RequestError: Nobody knows of such a pool, or a purge is under way.
        """
        if self._tasks:
            raise RequestError(
                "a purge is running at this gateway; try again after its end", status=409
            )
        task = asyncio.create_task(self._run(source, loop, is_dry=is_dry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Break off; what is left of a purge is done when it is asked for again."""
        await cancel_all(self._tasks)

    async def _run(self, source: str, loop: Loop, *, is_dry: bool) -> JsonObject:
        if is_dry or source not in self._live.pools.names():
            found = await self._at_pools(source, is_dry=True)
            if source not in self._live.pools.names() and not any(
                pool.num_blocks for pool in found.values()
            ):
                raise _unknown(source, self._live.pools.names())
            if is_dry:
                return _report(source, found, {}, None)
        found = await self._at_pools(source, is_dry=False)
        names = list(self._live.engines.by_name)
        problems = await asyncio.gather(
            *(self._forget(engine) for engine in self._live.engines.by_name.values())
        )
        ends = (self._end_at(pool, source, told) for pool, told in found.items())
        found = dict(zip(found, await asyncio.gather(*ends), strict=True))
        forgot = dict(zip(names, problems, strict=True))
        return _report(source, found, forgot, self._note(source, loop, found, forgot))

    async def _at_pools(self, source: str, *, is_dry: bool) -> dict[str, Purged]:
        """Result of a purge at each pool node."""
        names = self._live.pools.names()
        found = await asyncio.gather(*(self._at(pool, source, is_dry) for pool in names))
        return dict(zip(names, found, strict=True))

    async def _at(self, pool: str, source: str, is_dry: bool) -> Purged:
        try:
            return await self._live.pools.client(pool).purge(source, is_dry=is_dry)
        except PeerError as error:
            return Purged(0, 0, 0, 0, 0, str(error))

    async def _end_at(self, pool: str, source: str, told: Purged) -> Purged:
        """End a purge at a pool node; it is not done if blocks were taken again before."""
        try:
            was_barred = await self._live.pools.client(pool).end_purge(source)
        except PeerError as error:
            return replace(told, problem=told.problem or f"at its end: {error}")
        return told if was_barred or told.problem else replace(told, problem=TAKEN_AGAIN)

    async def _forget(self, engine: Engine) -> str:
        """Have an engine forget; why it did not, or nothing."""
        is_held = False
        try:
            for number in range(TRIES_MAX):
                if await self._live.engines.forget(engine):
                    self._on_forgotten(engine.name)
                    return ""
                if number == TRIES_FREE and not self._live.driver.is_drained(engine.name):
                    is_held = True
                    self._live.driver.set_drained(engine.name, time.monotonic_ns(), drained=True)
                await asyncio.sleep(self._retry_s)
        except EngineError as error:
            return str(error)
        finally:
            if is_held:
                self._live.driver.set_drained(engine.name, time.monotonic_ns(), drained=False)
        return f"it would not in {TRIES_MAX} attempts: blocks are being loaded; ask again"

    def _note(
        self, source: str, loop: Loop, found: dict[str, Purged], forgot: dict[str, str]
    ) -> Entry:
        failed = [name for name, told in found.items() if told.problem]
        failed += [name for name, problem in forgot.items() if problem]
        left = f"; NOT DONE at {', '.join(failed)}: ask again" if failed else ""
        return self._live.journal.note(
            loop,
            "purge",
            f"source {source}",
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
    source: str, found: dict[str, Purged], forgot: dict[str, str], entry: Entry | None
) -> JsonObject:
    problems = [told.problem for told in found.values()] + list(forgot.values())
    return {
        "source": source,
        "dry_run": entry is None,
        "is_complete": not any(problems),
        "pools": [_at_pool(name, told) for name, told in found.items()],
        "engines": [{"name": name, "problem": problem} for name, problem in forgot.items()],
        "decision": entry and entry.as_json(),
    }


def _at_pool(name: str, told: Purged) -> JsonObject:
    counts = asdict(told)
    del counts["job"]
    return {"name": name} | counts


def _unknown(source: str, known: list[str]) -> RequestError:
    return RequestError(
        f"there is no pool {source[:80]!r}, and no block came from such a pool; known pools: "
        f"{', '.join(known) or 'none'}",
        status=404,
    )
