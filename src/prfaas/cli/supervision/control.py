"""The control channel of a running `prfaas up`: HTTP on a unix socket that only its owner opens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas.audit.settings import AuditSettings
from prfaas.audit.up_audit import UpAudit, user_of
from prfaas.cli.supervision.keeper import PartChange
from prfaas.cli.supervision.supervisor import Supervisor
from prfaas.errors import ConfigError

Scale = Callable[[str, int], Awaitable[list[str]]]
"""Takes a cluster and a number of engines; returns their names once all are ready or gone.

Raises `ConfigError` if that number cannot be.
"""
SOCKET_NAME = "up.sock"
BODY_BYTES_MAX = 4096


@contextlib.asynccontextmanager
async def control_channel(
    supervisor: Supervisor,
    state: Path,
    settings: AuditSettings | None = None,
    scale: Scale | None = None,
) -> AsyncIterator[None]:
    """Answer `prfaas ctl parts` and `prfaas ctl restart` while the context is open; ConfigError if
    the socket cannot be made, or the log cannot be written.

    Args:
        state: State directory of the deployment; no other `up` uses it.
        settings: Audit log of restarts; None without.
        scale: Changes the number of engines of a cluster; None where that is fixed.
    """
    audit = UpAudit(settings)

    async def show(_: web.Request) -> web.Response:
        return _parts(supervisor.changes())

    async def restart(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not audit.accepts:
            raise ConfigError(
                'the audit log cannot be written, and audit.on_full is "closed": nothing is '
                "restarted; make room on its disk"
            )
        try:
            supervisor.ask_restart(name)
        except KeyError:
            known = ", ".join(part.name for part in supervisor.parts)
            raise ConfigError(f"there is no part {name!r} here; there are {known}") from None
        connection = request.get_extra_info("socket")
        await audit.restarted(user_of(connection) if connection else "", name)
        return _parts([supervisor.keeper(name).change])

    async def scaled(request: web.Request) -> web.Response:
        cluster, count = request.match_info["cluster"], request.match_info["count"]
        if scale is None:
            raise ConfigError("only `prfaas ray up` changes the number of its engines")
        if not count.isdecimal() or len(count) > 6:
            raise ConfigError(f"{count!r} is no number of engines")
        return web.json_response({"engines": await scale(cluster, int(count))})

    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_refusals])
    app.router.add_get("/parts", show)
    app.router.add_post("/parts/{name}/restart", restart)
    app.router.add_post("/engines/{cluster}/{count}", scaled)
    path = state / SOCKET_NAME
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, _listener(path)).start()
        yield
    finally:
        await runner.cleanup()
        path.unlink(missing_ok=True)
        await asyncio.to_thread(audit.close)


def _listener(path: Path) -> socket.socket:
    """A listening socket that others could open at no time."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        # A socket of a killed `up`: the lock on the directory shows that it has no owner.
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"the control socket cannot be created at {path}: {error.strerror or error}; name "
            "another directory as `state`, of 90 characters at most"
        ) from None
    finally:
        os.umask(umask)
    return listener


@web.middleware
async def _refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConfigError as error:
        return web.json_response({"error": {"message": str(error)}}, status=409)


def _parts(changes: list[PartChange]) -> web.Response:
    return web.json_response({"parts": [_as_json(change) for change in changes]})


def _as_json(change: PartChange) -> dict[str, Any]:
    part = change.part
    return {
        "name": part.name,
        "kind": part.kind,
        "phase": change.phase,
        "reason": change.reason,
        "due_in_s": change.due_in_s,
        "failures": change.failures,
        "pid": change.pid,
        "log": str(part.log),
        "places": part.places,
    }
