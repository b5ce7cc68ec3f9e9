"""The store room of a pool node: blocks in memory, on disk, and in the tier of the site."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Set
from functools import partial
from heapq import nlargest
from pathlib import Path
from secrets import token_bytes

from prfaas.core.cache.keep_rules import KeepRules
from prfaas.errors import ConfigError
from prfaas.logs import log_event
from prfaas.pool.keys.site_keys import SECRET_BYTES, load_keys
from prfaas.pool.keys.wrapping import SiteKeyWrapper
from prfaas.pool.metrics.metrics import PoolMetrics
from prfaas.pool.node.own_site import OwnSite
from prfaas.pool.node.settings import PoolSettings
from prfaas.pool.store.block_store import BlockStore
from prfaas.pool.store.disk_segments import SegmentFiles
from prfaas.pool.store.disk_tier import DiskTier
from prfaas.pool.store.memory_room import MemoryRoom
from prfaas.pool.store.tier_ports import SharedTier
from prfaas.units import format_size
from prfaas.wire.messages.fields import TENANTS_HELD_MAX
from prfaas.wire.messages.gateway import TenantUse, TierUse

CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")


def check_limits(
    memory_bytes: int, disk: Path | None, disk_bytes: int, cgroup_max: Path = CGROUP_MAX
) -> None:
    """Refuse limits that could never be reached: they would be no limits; ConfigError if the host
    has less memory or disk in total.

    Args:
        memory_bytes: Limit of blocks in memory.
        disk: Folder of the disk tier; None without.
        disk_bytes: Limit of its files.
        cgroup_max: File with the memory limit of the control group.
    """
    has_bytes = host_memory_bytes(cgroup_max)
    if memory_bytes > has_bytes:
        raise ConfigError(
            f"{format_size(memory_bytes)} of memory are more than the {format_size(has_bytes)} "
            "that this host has; give --memory less"
        )
    if disk is None:
        return
    place = next(path for path in [disk.absolute(), *disk.absolute().parents] if path.exists())
    found = os.statvfs(place)
    has_bytes = found.f_blocks * found.f_frsize
    if disk_bytes > has_bytes:
        raise ConfigError(
            f"{format_size(disk_bytes)} of files are more than the {format_size(has_bytes)} that "
            f"the disk of {disk} has; give --disk-limit less"
        )


def host_memory_bytes(cgroup_max: Path = CGROUP_MAX) -> int:
    """Memory limit of processes: that of the host, or of their control group."""
    memory: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(cgroup_max.read_text()))
    return memory


_log = logging.getLogger(__name__)

PURPOSE = "the disk tier"


def disk_wrapper(
    folder: Path, keys: Path | None, own: Path | None
) -> tuple[SiteKeyWrapper | None, bool]:
    """Return the wrapper of the keys of a disk tier, and True if its key was made just now.

    Without a wrapper blocks are in the clear.

    Args:
        folder: Of the disk tier.
        keys: File of the site's keys.
        own: Made if it is missing, where `keys` is None.

    Raises:
        ConfigError: The file cannot be read or made, is open to others, or has no valid key.
    """
    if keys is None and own is None:
        log_event(_log, logging.WARNING, "disk_in_the_clear", folder=str(folder))
        return None, False
    is_new = keys is None and own is not None and not own.exists() and _make(own)
    return SiteKeyWrapper(load_keys(keys or own or Path(), PURPOSE)), is_new


def _make(path: Path) -> bool:
    """Write a new key, complete or not at all; return False if another process did."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(base64.b64encode(token_bytes(SECRET_BYTES)) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        try:
            path.hardlink_to(draft)
            is_made = True
        except FileExistsError:
            is_made = False
        draft.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}") from None
    if is_made:
        log_event(_log, logging.INFO, "disk_key_made", file=str(path))
    return is_made


HOST, DISK, SHARED = "host", "disk", "shared"
"""Tiers: labels of metrics, and names in reports to gateways."""
OpenShared = Callable[[Set[str], PoolMetrics, BlockStore], SharedTier]
"""Opens the tier of the site below a store, given the names of its other pool nodes."""


class StoreRoom:
    """The tiers of one pool node.

    Args:
        open_shared: Opens the tier of the site; None without one.

    Raises:
        ConfigError: The host has less than the settings allow, or a tier cannot be opened.
    """

    def __init__(self, site: OwnSite, metrics: PoolMetrics, open_shared: OpenShared | None) -> None:
        settings = site.settings
        check_limits(settings.memory_bytes, settings.disk, settings.disk_bytes)
        self.memory = BlockStore(
            settings.memory_bytes,
            site.feed,
            site.order_of(settings.memory_bytes),
            rules=KeepRules(settings.name, settings.regions, settings.wall_s),
        )
        site.attach(self.memory)
        self.disk = self._open_disk(settings, settings.disk, metrics) if settings.disk else None
        self.shared = open_shared(site.hosts, metrics, self.memory) if open_shared else None
        tiers = ((HOST, self.memory.room), (DISK, self.disk), (SHARED, self.shared))
        self.tiers: dict[str, MemoryRoom | DiskTier | SharedTier] = {
            name: tier for name, tier in tiers if tier is not None
        }
        """The fastest first."""

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Read and write the tiers below memory until the tasks are cancelled."""
        if self.disk is not None:
            tasks.create_task(self.disk.run())
        if self.shared is not None:
            tasks.create_task(self.shared.run())

    async def close(self) -> None:
        """Write what waits, and end."""
        if self.disk is not None:
            await self.disk.close()
        if self.shared is not None:
            await self.shared.close()

    def uses(self) -> dict[str, TierUse]:
        """Use of each tier."""
        return {
            name: TierUse(
                used_bytes=tier.used_bytes, capacity_bytes=tier.capacity_bytes, num_blocks=len(tier)
            )
            for name, tier in self.tiers.items()
        }

    def tenants(self) -> dict[str, TenantUse]:
        """Bytes of tenants by tag: of those that hold the most, TENANTS_HELD_MAX at most."""
        in_memory = self.memory.room.held_bytes
        on_disk: Mapping[str, int] = {} if self.disk is None else self.disk.held_bytes

        def held(tag: str) -> int:
            return in_memory.get(tag, 0) + on_disk.get(tag, 0)

        tags = nlargest(TENANTS_HELD_MAX, (in_memory.keys() | on_disk.keys()) - {""}, held)
        return {
            tag: TenantUse(host_bytes=in_memory.get(tag, 0), disk_bytes=on_disk.get(tag, 0))
            for tag in tags
        }

    def watch(self, metrics: PoolMetrics) -> None:
        """Have gauges read at each scrape."""
        for name, tier in self.tiers.items():
            metrics.capacity_bytes.labels(tier=name).set(tier.capacity_bytes)
            metrics.used_bytes.labels(tier=name).set_function(partial(getattr, tier, "used_bytes"))
            metrics.blocks.labels(tier=name).set_function(tier.__len__)
        room, order = self.memory.room, self.memory.order
        if (disk := self.disk) is not None:
            metrics.tenant_keys.set_function(lambda: disk.num_keys)
        metrics.loose_bytes.set_function(lambda: room.loose_bytes)
        metrics.leased_blocks.set_function(lambda: order.num_leased)
        metrics.leased_bytes.set_function(lambda: order.leased_bytes)
        metrics.pinned_bytes.set_function(lambda: order.pinned_bytes)
        metrics.pinned_blocks.set_function(lambda: room.num_pinned)

    def _open_disk(self, settings: PoolSettings, folder: Path, metrics: PoolMetrics) -> DiskTier:
        wrapper, is_new = disk_wrapper(folder, settings.disk_keys, settings.own_disk_key)
        files = SegmentFiles(folder, self.memory.rules.regions, wrapper, is_new_key=is_new)
        disk = DiskTier(files, settings.disk_bytes, metrics, self.memory, settings.disk_limits)
        self.memory.tiers.add(disk)
        return disk
