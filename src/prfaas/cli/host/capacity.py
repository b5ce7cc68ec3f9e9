"""Memory and disk limits of the parts started here, compared with this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from prfaas.config.deployment import Deployment
from prfaas.config.engines.cores import runs_on_cpu
from prfaas.errors import ConfigError
from prfaas.pool.node.store_room import host_memory_bytes
from prfaas.units import format_size


def check_capacity(deployment: Deployment) -> None:
    """See that the memory and the disk limits of all parts started here fit this machine together;
    ConfigError if they do not.

    A limit that cannot be reached is no limit: the kernel would end a part long before it.
    """
    _check_memory(deployment)
    _check_disks(deployment)


def _check_memory(deployment: Deployment) -> None:
    asked = dict(_memory(deployment))
    total_bytes, has_bytes = sum(asked.values()), host_memory_bytes()
    if total_bytes > has_bytes:
        shown = ", ".join(f"{key} {format_size(size)}" for key, size in asked.items())
        raise ConfigError(
            f"the parts started here would fill {format_size(total_bytes)} of memory, and this "
            f"machine, or its control group, has {format_size(has_bytes)}: {shown}; give them "
            "less, or set `address` and `url` of parts that run elsewhere"
        )


def _memory(deployment: Deployment) -> Iterator[tuple[str, int]]:
    """Bytes by key of the deployment file."""
    for cluster_name, cluster in deployment.clusters.items():
        place = f"clusters.{cluster_name}"
        for name, pool in cluster.pools.items():
            if not pool.address:
                yield f"{place}.pools.{name}.memory", pool.memory
        for name, engine in cluster.engines.items():
            if engine.url:
                continue
            yield f"{place}.engines.{name}.host_memory", engine.host_memory
            if cluster.timing is None and runs_on_cpu():
                yield f"{place}.engines.{name}.kv_cache_memory", engine.kv_cache_memory


def _check_disks(deployment: Deployment) -> None:
    limits: dict[int, list[tuple[str, int]]] = {}
    sizes: dict[int, int] = {}
    for cluster_name, cluster in deployment.clusters.items():
        for name, pool in cluster.pools.items():
            if pool.address or pool.disk is None or pool.disk_limit is None:
                continue
            key = f"clusters.{cluster_name}.pools.{name}.disk_limit"
            there = _nearest(pool.disk)
            device = there.stat().st_dev
            limits.setdefault(device, []).append((key, pool.disk_limit))
            sizes[device] = shutil.disk_usage(there).total
    for device, asked in limits.items():
        total_bytes = sum(size for _, size in asked)
        if total_bytes > sizes[device]:
            shown = ", ".join(f"{key} {format_size(size)}" for key, size in asked)
            raise ConfigError(
                f"{shown}: {format_size(total_bytes)} together are more than the "
                f"{format_size(sizes[device])} of their disk; lower the limits, or use folders on "
                "other disks"
            )


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(each for each in [path.absolute(), *path.absolute().parents] if each.exists())
