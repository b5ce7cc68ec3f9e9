"""Checks of a pool node's limits against its host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.units import format_size

CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")


def check_limits(
    memory_bytes: int, disk: Path | None, disk_bytes: int, cgroup_max: Path = CGROUP_MAX
) -> None:
    """Refuse limits that could never be reached: they would be no limits.

    Args:
        memory_bytes: Limit of blocks in memory.
        disk: Folder of the disk tier; None without.
        disk_bytes: Limit of its files.
        cgroup_max: File with the memory limit of the control group.

    Raises:
        ConfigError: The host has less memory or disk in total.
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
