"""The control channel of a running `prfaas up`: HTTP on a unix socket that only its owner opens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from prfaas.audit.settings import AuditSettings
from prfaas.audit.up_audit import UpAudit, user_of
from prfaas.cli.supervision.supervisor import PartChange, Supervisor
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
    """Answer `prfaas ctl parts` and `prfaas ctl restart` while the context is open.

    Args:
        state: State directory of the deployment; no other `up` uses it.
        settings: Audit log of restarts; None without.
        scale: Changes the number of engines of a cluster; None where that is fixed.

    Raises:
        ConfigError: The socket cannot be made, or the log cannot be written.
    """
    audit = UpAudit(settings)
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    pages = _Parts(supervisor, audit)
    app.router.add_get("/parts", pages.show)
    app.router.add_post("/parts/{name}/restart", pages.restart)
    if scale is not None:
        app.router.add_post("/engines/{cluster}/{count}", partial(_scale, scale))
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


async def _scale(scale: Scale, request: web.Request) -> web.Response:
    count = request.match_info["count"]
    try:
        if not count.isdecimal() or len(count) > 6:
            raise ConfigError(f"{count!r} is no number of engines")
        engines = await scale(request.match_info["cluster"], int(count))
    except ConfigError as error:
        return _error(str(error), 409)
    return web.json_response({"engines": engines})


class _Parts:
    """Handlers."""

    def __init__(self, supervisor: Supervisor, audit: UpAudit) -> None:
        self._supervisor, self._audit = supervisor, audit

    async def show(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"parts": [_as_json(change) for change in self._supervisor.changes()]}
        )

    async def restart(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not self._audit.accepts:
            return _error(
                'the audit log cannot be written, and audit.on_full is "closed": nothing is '
                "restarted; make room on its disk",
                503,
            )
        try:
            self._supervisor.ask_restart(name)
        except KeyError:
            known = ", ".join(part.name for part in self._supervisor.parts)
            return _error(f"there is no part {name!r} here; there are {known}", 404)
        connection = request.get_extra_info("socket")
        await self._audit.restarted(user_of(connection) if connection else "", name)
        found = [each for each in self._supervisor.changes() if each.part.name == name]
        return web.json_response({"parts": [_as_json(change) for change in found]}, status=202)


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _as_json(change: PartChange) -> dict[str, Any]:
    part = change.part
    running = part.is_started and part.exit_code is None
    return {
        "name": part.name,
        "kind": part.kind,
        "phase": change.phase,
        "reason": change.reason,
        "due_in_s": change.due_in_s,
        "failures": change.failures,
        "pid": part.pid if running else None,
        "log": str(part.log),
        "places": part.places,
    }
