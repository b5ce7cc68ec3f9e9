"""Reports of an engine's ranks to its scheduler: the host memory they copy to, and their pages.

The scheduler describes blocks by vLLM's configuration. Two things that decide where their bytes lie
are known to the ranks alone: the file that each has mapped as the engine's host memory, and the
kernel blocks into which its attention backends split a page. A rank reports both when vLLM
registers its caches, which is before the scheduler's connector is made.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from prfaas.config.engine_args import hosts_refused
from prfaas.engines.canonical.vllm_parts import KernelPages
from prfaas.engines.canonical.vllm_rows import layer_specs
from prfaas.errors import ConfigError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(msgspec.Struct, frozen=True):
    """Identity of a file of host memory.

    Attributes:
        host: Host name, for messages.
        boot: Identity of the running kernel.
        device: Number of the file system.
        inode: Number of the file.
    """

    host: str
    boot: str
    device: int
    inode: int

    @property
    def file(self) -> tuple[str, int, int]:
        """Identity of a file, by which files of two hosts differ too."""
        return self.boot, self.device, self.inode

    @property
    def words(self) -> str:
        """The file and its host."""
        return f"file {self.device}:{self.inode} at {self.host}"


class RankReport(msgspec.Struct, frozen=True):
    """Report of a rank.

    Attributes:
        memory: The host memory that it copies to and from.
        pages: Pages of its layers with attention, by layer.
    """

    memory: Memory
    pages: dict[str, KernelPages]


def memory_of(found: os.stat_result) -> Memory:
    """Return the identity of a file on this host."""
    return Memory(socket.gethostname(), _BOOT.read_text().strip(), found.st_dev, found.st_ino)


def kernel_pages(
    kv_cache_config: KVCacheConfig, caches: Mapping[str, Any]
) -> dict[str, KernelPages]:
    """Return the order of a rank's pages, by layer.

    Args:
        caches: The cache of each layer, `[B, H, N, C]` with B in kernel blocks, as vLLM registers
            it.
    """
    found: dict[str, KernelPages] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        for layer, spec in zip(
            group.layer_names, layer_specs(kv_cache_config, number), strict=True
        ):
            cache = caches.get(layer)
            if isinstance(spec, AttentionSpec) and cache is not None and cache.dim() == 4:
                pieces = max(1, cache.shape[0] // kv_cache_config.num_blocks)
                axes = zip("HNC", cache.shape[1:], cache.stride()[1:], strict=True)
                outer_first = sorted(axes, key=lambda axis: axis[2], reverse=True)
                order = "".join(name for name, size, _ in outer_first if size > 1)
                found[layer] = KernelPages(pieces, order)
    return found


def pages_of_ranks(
    reports: Mapping[int, bytes], num_ranks: int, own: Memory
) -> dict[str, KernelPages]:
    """Return the order of the pages of all ranks, by layer.

    Args:
        reports: Encoded reports, by rank.
        own: The host memory that the engine's pool node maps.

    Raises:
        ConfigError: A rank has left no report, copies to other memory, or has pages of another
            order than the others.
    """
    if missing := sorted(set(range(num_ranks)) - set(reports)):
        raise ConfigError(
            hosts_refused(
                f"rank {missing[0]} of {num_ranks} is not in the shared memory of "
                f"{own.host} ({len(missing)} are missing)"
            )
        )
    pages: dict[str, KernelPages] = {}
    for rank in range(num_ranks):
        report = msgspec.json.decode(reports[rank], type=RankReport)
        if report.memory.file != own.file:
            raise ConfigError(
                hosts_refused(
                    f"rank {rank} has {report.memory.words} as host memory, and the scheduler "
                    f"{own.words}"
                )
            )
        for layer, found in report.pages.items():
            if pages.setdefault(layer, found) != found:
                raise ConfigError(
                    f"layer {layer} has pages of {found.words} at rank {rank} and of "
                    f"{pages[layer].words} at another; give all ranks the same attention backend"
                )
    return pages
