"""`prfaas check FILE --pool NAME`: a pool node on a host, or in a pod, without the other parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prfaas.cli.deploy.deployment_checks import check_disks, open_secrets, short_lived
from prfaas.cli.deploy.deployment_warnings import pool_traps
from prfaas.cli.deploy.topology import check_sockets, identity_problems
from prfaas.cli.host.capacity import check_capacity
from prfaas.cli.preflight.deployment_files import unusable_disk_keys, unusable_shared_tiers
from prfaas.config.addresses import split_address
from prfaas.config.deployment import Deployment
from prfaas.errors import ConfigError


def alone(deployment: Deployment, name: str) -> Deployment:
    """The same deployment with one of its pool nodes started here, and nothing else; ConfigError if
    there is no such pool node."""
    if name not in deployment.pools:
        known = ", ".join(deployment.pools) or "none"
        raise ConfigError(f"--pool {name} is no pool node of the file, which has {known}")
    clusters = {}
    for key, table in deployment.clusters.items():
        found = table.pools.get(name)
        if found is None:
            other: dict[str, object] = {"pools": {}, "engines": {}, "s3": None, "mooncake": None}
            clusters[key] = table.model_copy(update=other)
            continue
        listen = found.listen
        if listen is None and found.address is not None:
            listen = f"0.0.0.0:{split_address(found.address)[1]}"
        here = found.model_copy(update={"address": None, "listen": listen})
        clusters[key] = table.model_copy(update={"pools": {name: here}, "engines": {}})
    return deployment.model_copy(update={"clusters": clusters})


def check_pool(deployment: Deployment, name: str) -> tuple[list[str], list[str]]:
    """Return what keeps a pool node from starting here or from being used, and warnings.

    Raises:
        ConfigError: It is not in the file, or its limits or its socket's path cannot work here.
    """
    here = alone(deployment, name)
    check_sockets(here)
    check_disks(here)
    check_capacity(here)
    problems = [
        *identity_problems(deployment, [name]),
        *unusable_shared_tiers(here),
        *unusable_disk_keys(here),
        *socket_problems(here.pool_socket(name)),
    ]
    warnings = [*open_secrets(here, [name]), *short_lived(here, [name]), *pool_traps(here)]
    return problems, warnings


def socket_problems(path: Path) -> Iterator[str]:
    """A line if a pool node of this user cannot make its socket, or its engines cannot open it."""
    folder = path.absolute().parent
    user = os.getuid()
    hint = (
        "in Kubernetes, a folder of the node (hostPath) is root's until an init container hands it "
        "over, and pool node and engines need the same runAsUser"
    )
    if not folder.is_dir():
        yield f"{folder}, the folder of the socket, is missing: make it, for user {user}; {hint}"
        return
    if path.exists() and path.stat().st_uid != user:
        yield (
            f"the socket {path} belongs to user {path.stat().st_uid}, and this is user {user}: "
            f"pool node and engines of a host have to be the same user; {hint}"
        )
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield (
            f"{folder}, the folder of the socket, belongs to user {folder.stat().st_uid}, and this "
            f"is user {user}, who cannot write there; {hint}"
        )
