"""Checks of a pool node's limits against its host."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.units import format_size

CGROUP_MAX = Path("/sys/fs/cgroup/memory.max")


def check_limits(memory_bytes: int, disk: Path | None, disk_bytes: int) -> None:
    """Refuse limits that could never be reached: they would be no limits.

    Raises:
        ConfigError: The host has less memory or disk in total.
    """
    has_bytes = host_memory_bytes()
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


def host_memory_bytes() -> int:
    """Memory limit of processes: that of the host, or of their control group."""
    memory: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(CGROUP_MAX.read_text()))
    return memory
