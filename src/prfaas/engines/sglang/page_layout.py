"""The cache groups of an SGLang engine, and its hello to the pool node.

Ranks of tensor parallelism are processes with a host memory each, and a page of a rank has the
heads of that rank. So each rank's part of a page is a cache group of its own: a page is usable
where every rank has its part, which is what the pool node and the gateway require of groups
anyway. The latent pages of MLA are the same at all ranks and are one group.

A page is a row of shared memory. SGLang allocates a host pool in one piece. With the `shm`
allocator that is an anonymous file, whose descriptor goes to the pool node. A page lies in it in
one or several parts: keys and values of all layers in two, or every layer in a part of its own. The
parts of the next page begin at a constant distance, so one description holds for all pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.core.kv.blocks import CacheGroup, GroupKind, HashScheme, Layout, Plane, facts_id
from prfaas.errors import ConfigError
from prfaas.wire.messages.engine import EngineHello
from prfaas.wire.messages.fields import GROUPS_MAX
from prfaas.wire.messages.layouts import layout_spec

ALLOCATOR = '"allocator": "shm"'


@dataclass(frozen=True, slots=True)
class HostRows:
    """Place where the pages of a host pool lie in its file."""

    descriptor: int
    """Of the file; SGLang's."""
    page_tokens: int
    num_pages: int
    stride: int
    """Distance of two pages, bytes."""
    parts: tuple[tuple[int, int], ...]
    """Offset and length of the parts of the first page, bytes, in SGLang's order."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(length for _, length in self.parts)

    @property
    def span(self) -> int:
        """Distance from the begin of a page's first part to the end of its last, bytes."""
        return max(offset + length for offset, length in self.parts)

    def pages(self, indices: Sequence[int], num: int) -> list[int] | None:
        """Numbers of pages.

        Args:
            indices: SGLang's host indices, one a token.
            num: Pages that there should be.

        Returns:
            None if the indices are not those of so many whole pages of this pool.
        """
        if len(indices) != num * self.page_tokens:
            return None
        firsts = indices[:: self.page_tokens]
        found = [first // self.page_tokens for first in firsts]
        if any(first % self.page_tokens for first in firsts):
            return None
        return found if all(0 <= page < self.num_pages for page in found) else None


def host_rows(pool: Any, name: str) -> HostRows:
    """Describe a host pool of SGLang (`HostKVCache`).

    Args:
        name: Of the pool, for messages.

    Raises:
        ConfigError: It is not in shared memory, or its pages do not lie at equal distances in it.
    """
    descriptor = getattr(pool, "fd", None)
    if descriptor is None:
        raise ConfigError(
            f"the host pool {name!r} is not in shared memory; add {ALLOCATOR} to "
            "--hicache-storage-backend-extra-config"
        )
    page_tokens, num_pages = int(pool.page_size), int(pool.size) // int(pool.page_size)
    base, size = pool.kv_buffer.data_ptr(), os.fstat(descriptor).st_size
    first, second = (_parts(pool, page, page_tokens, base) for page in (0, min(1, num_pages - 1)))
    stride = second[0][0] - first[0][0] or size
    moved = tuple((offset + stride, length) for offset, length in first)
    rows = HostRows(descriptor, page_tokens, num_pages, stride, first)
    is_whole = (num_pages - 1) * stride + rows.span <= size
    if stride < 1 or first[0][0] or (num_pages > 1 and moved != second) or not is_whole:
        raise ConfigError(
            f"the pages of host pool {name!r} ({getattr(pool, 'layout', '?')}) are not at equal "
            "distances in one file; start SGLang with --hicache-mem-layout page_first_direct"
        )
    return rows


def _parts(pool: Any, page: int, page_tokens: int, base: int) -> tuple[tuple[int, int], ...]:
    """Offset in the file and length of every part of a page."""
    import torch

    start = page * page_tokens
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(start, start + page_tokens))
    return tuple((int(at) - base, int(n)) for at, n in zip(pointers, sizes, strict=True))


KV = "kv"
"""SGLang's name of the pool of attention."""
MAMBA = "mamba"
LOADERS = frozenset({"auto", "bitsandbytes", "dummy", "gguf", "npcache", "pt", "safetensors"})
"""Values of `--load-format` that load the files of the checkpoint."""
UPSTREAM = "https://github.com/sgl-project/sglang/issues/39830"


def check_pools(pools: Iterable[str], *, accepts_unproven: bool) -> None:
    """Refuse models that keep more than the keys and values of full attention; ConfigError if there
    is another pool."""
    others = sorted(set(pools) - {KV})
    if others and not accepts_unproven:
        raise ConfigError(
            f"this model has {', '.join(others)} besides the pages of full attention. SGLang "
            "restores the bytes of such models from its host tier, and answers with them differ "
            f"from answers without ({UPSTREAM}); no run on a GPU has shown otherwise. Serve this "
            "model with vLLM, or start SGLang without --hicache-storage-backend"
        )


def check_ranks(config: Any) -> None:
    """Refuse ranks whose parts of a page have no name here (`HiCacheStorageConfig`); ConfigError if
    there is one."""
    found = {
        "--pp-size": (config.pp_size, 1, "a stage does not know the pages of the others"),
        "--attn-cp-size": (config.attn_cp_size, 1, "a rank holds a part of each page"),
        "decode context parallelism": (config.dcp_size, 1, "a rank holds a part of each page"),
        "data-parallel rank": (config.dp_rank, 0, "start an engine of its own for each rank"),
    }
    for name, (value, limit, why) in found.items():
        if value != limit:
            raise ConfigError(f"{name} is {value}; the pool node needs {limit}: {why}")
    if config.should_split_heads:
        raise ConfigError("tp_lcm_size splits pages by head; leave it out, and use one --tp-size")


def check_nodes(num_nodes: int) -> None:
    """Refuse an engine with ranks on several hosts; ConfigError if there are several."""
    if num_nodes > 1:
        raise ConfigError(
            f"--nnodes {num_nodes}: each rank hands its part of a page to the pool node of its own "
            "host, and no pool node has whole pages. Run all ranks of an engine on one host, and "
            "an engine of its own on each host"
        )


def check_features(values: Mapping[str, Any]) -> None:
    """Refuse features whose pages mean something that their names do not say; ConfigError if there
    is one.

    Args:
        values: SGLang's resolved configuration by dotted name.
    """
    if values.get("spec.speculative_algorithm"):
        raise ConfigError(
            f"speculative decoding ({values['spec.speculative_algorithm']}) names pages by pairs "
            "of tokens and packs a draft model's into them; start SGLang without it"
        )
    loader = values.get("model.load_format", "auto")
    if loader not in LOADERS or values.get("model.custom_weight_loader"):
        raise ConfigError(
            f"weights that --load-format {loader} or a loader of your own brings are not those of "
            f"the checkpoint's files, which name the pages; use {', '.join(sorted(LOADERS))}"
        )
    if values.get("lora.enable_lora") or values.get("lora.lora_paths"):
        raise ConfigError(
            "names of pages do not identify the bytes of an adapter; start SGLang without LoRA"
        )


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of all ranks, and the groups of this one."""

    layout: Layout
    own: Mapping[str, int]
    """This rank's group by pool."""


def page_layout(
    facts: Mapping[str, str], pools: Mapping[str, Any], rows: Mapping[str, HostRows], config: Any
) -> PageLayout:
    """Return the layout of an engine; the same at all its ranks.

    Args:
        facts: Facts of the layout id.
        pools: SGLang's host pools by name.
        rows: Where their pages lie.
        config: SGLang's `HiCacheStorageConfig`.

    Raises:
        ConfigError: Pages of different pools differ in tokens, or there are too many ranks.
    """
    tokens = {rows[name].page_tokens for name in pools if name != MAMBA}
    if len(tokens) != 1:
        raise ConfigError(f"pools with pages of {sorted(tokens)} tokens; all need the same")
    page_tokens = tokens.pop()
    groups: list[CacheGroup] = []
    own: dict[str, int] = {}
    for name in sorted(pools, key=lambda pool: (pool != KV, pool)):
        is_one = config.is_mla_model and name != MAMBA
        num, rank = (1, 0) if is_one else (config.tp_size, config.tp_rank)
        own[name] = len(groups) + rank
        kind = GroupKind.LINEAR_STATE if name == MAMBA else GroupKind.FULL_ATTENTION
        size = rows[name].page_bytes
        planes = (Plane(str(pools[name].dtype).removeprefix("torch."), size),)
        groups += [
            CacheGroup(len(groups) + at, kind, page_tokens, size, planes=planes)
            for at in range(num)
        ]
    if len(groups) > GROUPS_MAX:
        raise ConfigError(f"{len(groups)} parts of a page; the limit is {GROUPS_MAX}")
    layout = Layout(facts_id(facts), page_tokens, "", tuple(groups), HashScheme.SGLANG_PAGES)
    return PageLayout(layout, own)


def hello_of(
    engine: str, made: PageLayout, pool: str, rows: HostRows, facts: dict[str, str], model: str
) -> EngineHello:
    """Return the first message about the memory of one host pool.

    Args:
        engine: Name of the engine, as the pool node knows this memory.
        pool: Name of the host pool.
        rows: Where its pages lie.
        facts: Facts of the layout id.
    """
    group = made.own[pool]
    return EngineHello(
        engine=engine,
        layout=layout_spec(made.layout),
        row_bytes=rows.stride,
        num_rows=rows.num_pages,
        extents={group: list(rows.parts)},
        facts=facts,
        model=model,
        row_span=rows.span,
        elsewhere=[each.index for each in made.layout.groups if each.index != group],
    )


def engine_name(engine: str, pool: str, tp_rank: int) -> str:
    """Return the name under which a rank's memory is known: rank 0's is the engine's own."""
    name = engine if tp_rank == 0 else f"{engine}.tp{tp_rank}"
    return name if pool == KV else f"{name}.{pool}"
