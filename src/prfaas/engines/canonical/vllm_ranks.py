"""Reports of an engine's ranks to its scheduler: the host memory they copy to, and their pages.

The scheduler describes blocks by vLLM's configuration. Two things that decide where their bytes lie
are known to the ranks alone: the file that each has mapped as the engine's host memory, and the
kernel blocks into which its attention backends split a page. A rank reports both when vLLM
registers its caches, which is before the scheduler's connector is made.

The length of shared blocks may be a multiple of the engine's block size: vLLM copies several blocks
as one chunk (`blocks_per_chunk`). A chunk is a block for pool nodes and other sites. Sites whose
block sizes differ share blocks of a length that both sizes divide.
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
from prfaas.config.engines.block_tokens import SETTING, events_refused, length_refused
from prfaas.core.kv.blocks import GroupKind
from prfaas.engines.canonical.vllm_parts import KernelPages
from prfaas.engines.canonical.vllm_rows import layer_specs
from prfaas.errors import ConfigError

_CHUNKS = ("blocks_per_chunk", "block_size")
"""vLLM's own settings of chunks."""


def set_chunk(vllm_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """Set the blocks of a chunk from the length of shared blocks, if that is set; ConfigError if
    blocks of this length cannot be made of the engine's.

    Both sides of the connector, scheduler and workers, need it before vLLM reads its settings.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    tokens = extra.get(SETTING)
    if tokens is None:
        return
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"kv_connector_extra_config.{SETTING} is {tokens!r}: a number of tokens")
    given = [name for name in _CHUNKS if name in extra]
    sizes = _block_sizes(kv_cache_config)
    if given and extra.get("blocks_per_chunk") != tokens // max(sizes):
        raise ConfigError(f"{SETTING} and {given[0]} both set the length of blocks; give one")
    if sizes == {tokens}:
        return
    if len(sizes) > 1:
        raise ConfigError(
            f"{SETTING} is {tokens}, but the cache groups of this model have blocks of "
            f"{sorted(sizes)} tokens; only groups of one size can be combined"
        )
    [size] = sizes
    if tokens % size:
        raise ConfigError(length_refused(tokens, size, extra.get("prfaas_engine", "this engine")))
    events = vllm_config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        raise ConfigError(events_refused(tokens, size))
    if vllm_config.cache_config.prefix_match_unit is not None:
        raise ConfigError(
            f"--prefix-match-unit makes hits within a block, but {SETTING} = {tokens} is "
            f"{tokens // size} blocks of {size} tokens; leave one of them out"
        )
    extra["blocks_per_chunk"] = tokens // size


def _block_sizes(kv_cache_config: KVCacheConfig) -> set[int]:
    return {
        int(kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size)
        for group in kv_cache_config.prefix_cacheable_group_ids
    }


def refuse_kinds(kinds: set[GroupKind], blocks_per_chunk: int) -> None:
    """Refuse cache groups whose blocks were not seen to be combined; ConfigError if there is
    one."""
    if blocks_per_chunk > 1 and GroupKind.SLIDING_WINDOW in kinds:
        raise ConfigError(
            f"{SETTING} combines {blocks_per_chunk} blocks, which is not supported for sliding "
            "windows and chunked-local attention: vLLM frees a part of such a block; give all "
            "sites the same --block-size"
        )


_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Memory(msgspec.Struct, frozen=True):
    """Identity of a file of host memory."""

    host: str
    """Host name, for messages."""
    boot: str
    """Identity of the running kernel."""
    device: int
    """Number of the file system."""
    inode: int
    """Number of the file."""

    @property
    def file(self) -> tuple[str, int, int]:
        """Identity of a file, by which files of two hosts differ too."""
        return self.boot, self.device, self.inode

    @property
    def words(self) -> str:
        """The file and its host."""
        return f"file {self.device}:{self.inode} at {self.host}"


class RankReport(msgspec.Struct, frozen=True):
    """Report of a rank."""

    memory: Memory
    """The host memory that it copies to and from."""
    pages: dict[str, KernelPages]
    """Pages of its layers with attention, by layer."""


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
