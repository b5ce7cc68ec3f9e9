"""Questions to a running `prfaas up`; addresses of pool nodes, from the file or from it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from prfaas.cli.supervision.control import SOCKET_NAME
from prfaas.config.addresses import split_address
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError

TIMEOUT = aiohttp.ClientTimeout(total=10)
SCALE_TIMEOUT = aiohttp.ClientTimeout(total=40 * 60)
"""An engine may take half an hour to start, or its drain time to stop."""
STATES = (".state", ".state/*")
"""State directories that are tried where none is named."""


def parts_of(state: Path) -> list[dict[str, Any]]:
    """The parts of the deployment with that state directory; ConfigError if no `prfaas up` answers
    there."""
    found: list[dict[str, Any]] = _ask(state, "GET", "/parts")["parts"]
    return found


def restart_part(state: Path, name: str) -> list[dict[str, Any]]:
    """Restart a part; returns its state immediately; ConfigError if no `prfaas up` answers there,
    or it has no such part."""
    found: list[dict[str, Any]] = _ask(state, "POST", f"/parts/{quote(name, safe='')}/restart")[
        "parts"
    ]
    return found


def scale_engines(state: Path, cluster: str, count: int) -> list[str]:
    """Change the number of engines of a cluster; returns their names once that is done.

    Raises:
        ConfigError: No deployment with that state directory runs or it cannot have that number.
    """
    path = f"/engines/{quote(cluster, safe='')}/{count}"
    found: list[str] = _ask(state, "POST", path, SCALE_TIMEOUT)["engines"]
    return found


def running_state() -> Path:
    """State directory of the only deployment that runs from the working directory; ConfigError if
    there is none, or more than one."""
    sockets = [path for each in STATES for path in Path().glob(f"{each}/{SOCKET_NAME}")]
    if len(sockets) == 1:
        return sockets[0].parent
    found = ", ".join(str(path.parent) for path in sorted(sockets)) or "none"
    raise ConfigError(
        f"it is not known which deployment is meant: {found} in .state of this directory has a "
        f"{SOCKET_NAME}; give --file FILE, its deployment file"
    )


def _ask(
    state: Path, method: str, path: str, limit: aiohttp.ClientTimeout = TIMEOUT
) -> dict[str, Any]:
    status, answer = asyncio.run(_exchange(state / SOCKET_NAME, method, path, limit))
    if status >= 400:
        raise ConfigError(str(answer.get("error", {}).get("message", status)))
    return answer


async def _exchange(
    place: Path, method: str, path: str, limit: aiohttp.ClientTimeout
) -> tuple[int, dict[str, Any]]:
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(place)), timeout=limit
            ) as session,
            session.request(method, f"http://up{path}") as reply,
        ):
            found: dict[str, Any] = await reply.json()
            return reply.status, found
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"no `prfaas up` answers at {place}: {error}; start the deployment, or name another "
            "one with --file FILE"
        ) from None


def pool_address(deployment: Deployment, pool: str) -> tuple[str, int]:
    """Return the address of a pool node.

    Raises:
        ConfigError: The file has no such pool, or no address of it and no deployment runs.
    """
    for cluster in deployment.clusters.values():
        table = cluster.pools.get(pool)
        if table is None:
            continue
        text = table.address or table.listen
        host, port = split_address(text) if text else ("", 0)
        return (host, port) if port else _running_address(deployment, pool)
    known = ", ".join(name for c in deployment.clusters.values() for name in c.pools)
    raise ConfigError(f"the file has no pool {pool!r}; it has {known}")


def pool_addresses(deployment: Deployment) -> dict[str, tuple[str, int]]:
    """Return the addresses of all pool nodes that have one now."""
    found = {}
    for cluster in deployment.clusters.values():
        for pool in cluster.pools:
            with contextlib.suppress(ConfigError):
                found[pool] = pool_address(deployment, pool)
    return found


def _running_address(deployment: Deployment, pool: str) -> tuple[str, int]:
    """Return the address of a pool node with a port from `prfaas up`."""
    try:
        found = [part["places"].get(pool) for part in parts_of(deployment.state)]
    except ConfigError as error:
        raise ConfigError(
            f"pool {pool} has no fixed address in the file, and {error}; or give --to HOST:PORT"
        ) from None
    place = next((text for text in found if text), None)
    if place is None:
        raise ConfigError(f"`prfaas up` has not started pool {pool} yet; give --to HOST:PORT")
    return split_address(place)
