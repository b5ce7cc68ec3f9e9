"""Addresses of pool nodes: those of the file, or the ports that a running `prfaas up` chose."""

from __future__ import annotations

import contextlib

from prfaas.cli.supervision.client import parts_of
from prfaas.config.addresses import split_address
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError


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
